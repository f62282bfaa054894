"""Checks the arguments of cache_append and picks the implementation."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import choice
from pallas_kernels.cache_append import config, kernel, xla
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.target import CPU, Target


def cache_append(
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    pages: KVPages,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = 1e-6,
    interleaved: bool = False,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> tuple[jax.Array, KVPages]:
    """Rotate queries and keys by position, and write keys and values into their pages.

    qkv: [tokens, kv_heads, q_per_kv + 2, head_dim]: for each kv head its queries, its key, its value, which is left out
    ([.., q_per_kv + 1, ..]) where the pages' keys are the values. cos, sin: [tokens, pairs] f32, which turn the first
    2 x pairs dimensions (Su et al. 2021), i with i + pairs, or 2i with 2i + 1 if `interleaved`; None: no RoPE. q_norm,
    k_norm: [head_dim], RMSNorm scales applied to queries and keys before.
    page_ids, offsets: [tokens] i32, the page and the place in it of each token; a page id past the last page drops the
    token. No two tokens may share a place. 8-bit pages get their scales (`kv_pages.quantize_tokens`).
    Everything is computed in float32 and rounded once.

    Returns q [tokens, kv_heads, q_per_kv, head_dim] and the pages updated, in place when donated.
    Raises ValueError if shapes disagree, or an 8-bit cache lacks scales.
    """
    check(qkv, cos, sin, pages, page_ids, offsets, q_norm, k_norm)
    norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps}
    arrays = (qkv, cos, sin, pages, page_ids, offsets)
    if choice.resolve("cache_append", implementation, obstacle(target, interleaved, pages.shared)) == "xla":
        return xla.cache_append(*arrays, **norms, interleaved=interleaved, platform=target.platform)
    tokens, kv_heads, heads, head_dim = qkv.shape
    chosen = config.choose(tokens, kv_heads, heads - 2, head_dim)
    return kernel.cache_append(*arrays, **norms, config=chosen, interpret=interpret)


def obstacle(target: Target, interleaved: bool, shared: bool = False) -> str | None:
    """Why the kernel cannot run; None where it can. shared: of the pages."""
    if reason := target.lacks_mosaic():
        return reason
    if shared:
        return "it writes keys and values, and these pages hold keys alone"
    return "it turns halves of a head, not neighbouring dimensions" if interleaved else None


def check(
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    pages: KVPages,
    page_ids: jax.Array,
    offsets: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
) -> None:
    """ValueError for arguments that do not belong together."""
    choice.check_shape("qkv", qkv, (None, pages.kv_heads, None, pages.head_dim))
    tokens, _, heads, head_dim = qkv.shape
    least, needs = (2, "a query and a key") if pages.shared else (3, "a query, a key and a value")
    if heads < least:
        raise ValueError(f"qkv holds {heads} heads for each kv head; it needs {needs}: at least {least}")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together; only one of them is None")
    if cos is not None and sin is not None:
        choice.check_shape("cos", cos, (tokens, None))
        choice.check_shape("sin", sin, cos.shape)
        if 2 * cos.shape[1] > head_dim:
            raise ValueError(f"cos turns {cos.shape[1]} pairs of dimensions; head_dim {head_dim} has {head_dim // 2}")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            choice.check_shape(name, norm, (head_dim,))
    choice.check_shape("page_ids", page_ids, (tokens,))
    choice.check_shape("offsets", offsets, (tokens,))
    pages.check()
