"""Checks the arguments of cache_append and picks the implementation."""

from __future__ import annotations

import jax

from pallas_kernels import choice
from pallas_kernels.cache_append import xla


def cache_append(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    implementation: choice.Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotate queries and keys by position, and write keys and values into their pages.

    q: [tokens, kv_heads, q_per_kv, head_dim]; k, v: [tokens, kv_heads, head_dim]; cos, sin: [tokens, head_dim / 2] f32.
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]; page_ids, offsets: [tokens] i32, the page and the place in
    it of each token; a page id past the last page drops the token. No two tokens may share a place.
    Returns q rotated and the pages updated (in place when donated).
    Raises ValueError if shapes disagree or head_dim is odd.
    """
    tokens, kv_heads, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; RoPE turns pairs of dimensions, so it must be even")
    choice.check_shape("k", k, (tokens, kv_heads, head_dim))
    choice.check_shape("v", v, (tokens, kv_heads, head_dim))
    choice.check_shape("cos", cos, (tokens, head_dim // 2))
    choice.check_shape("sin", sin, (tokens, head_dim // 2))
    choice.check_shape("k_pages", k_pages, (None, kv_heads, None, head_dim))
    choice.check_shape("v_pages", v_pages, k_pages.shape)
    choice.check_shape("page_ids", page_ids, (tokens,))
    choice.check_shape("offsets", offsets, (tokens,))
    choice.resolve("cache_append", implementation)
    return xla.cache_append(q, k, v, cos, sin, k_pages, v_pages, page_ids, offsets)
