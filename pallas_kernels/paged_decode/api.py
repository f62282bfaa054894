"""Checks the arguments of paged_decode and picks the implementation."""

from __future__ import annotations

import jax

from pallas_kernels import choice
from pallas_kernels.paged_decode import xla
from pallas_kernels.tiles import CPU, Tiles


def paged_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    tiles: Tiles = CPU,
    implementation: choice.Implementation = None,
) -> jax.Array:
    """Attention of each sequence's newest token over its cache, itself included (append first).

    q: [batch, kv_heads, q_per_kv, head_dim]; k_pages, v_pages: [pages, kv_heads, page_size, head_dim];
    block_tables: [batch, width] i32, the pages of each sequence in order; lengths: [batch] i32, tokens in the cache;
    window: how many tokens back the query sees, itself included. Returns [batch, kv_heads, q_per_kv, head_dim], zero
    where the length is 0. Slots past a length, and pages of no sequence, may hold anything.
    tiles: how much the XLA version reads at once.
    Raises ValueError if shapes disagree.
    """
    batch, kv_heads, _, head_dim = q.shape
    choice.check_shape("k_pages", k_pages, (None, kv_heads, None, head_dim))
    choice.check_shape("v_pages", v_pages, k_pages.shape)
    choice.check_shape("block_tables", block_tables, (batch, None))
    choice.check_shape("lengths", lengths, (batch,))
    choice.check_window(window)
    choice.resolve("paged_decode", implementation)
    return xla.paged_decode(q, k_pages, v_pages, block_tables, lengths, scale=scale, window=window, tiles=tiles)
