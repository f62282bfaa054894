"""Checks the arguments of paged_prefill and picks the implementation."""

from __future__ import annotations

import jax

from pallas_kernels import choice
from pallas_kernels.paged_prefill import xla
from pallas_kernels.tiles import CPU, Tiles


def paged_prefill(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    query_start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    tiles: Tiles = CPU,
    implementation: choice.Implementation = None,
) -> jax.Array:
    """Causal attention of each sequence's newest tokens over its cache, themselves included (append first).

    q: [tokens, kv_heads, q_per_kv, head_dim], the chunks one after another; query_start: [batch + 1] i32, where each
    sequence's rows start and the last one's end; lengths: [batch] i32, tokens in the cache, so that the last row of a
    chunk is at position length - 1. k_pages, v_pages: [pages, kv_heads, page_size, head_dim]; block_tables:
    [batch, width] i32; window: how many tokens back a query sees, itself included. Returns the shape of q, zero for
    rows of no sequence. Slots past a length, and pages of no sequence, may hold anything.
    tiles: how much the XLA version takes at once.
    Raises ValueError if shapes disagree.
    """
    batch, (_, kv_heads, _, head_dim) = lengths.shape[0], q.shape
    choice.check_shape("k_pages", k_pages, (None, kv_heads, None, head_dim))
    choice.check_shape("v_pages", v_pages, k_pages.shape)
    choice.check_shape("block_tables", block_tables, (batch, None))
    choice.check_shape("query_start", query_start, (batch + 1,))
    choice.check_window(window)
    choice.resolve("paged_prefill", implementation)
    return xla.paged_prefill(
        q, k_pages, v_pages, block_tables, query_start, lengths, scale=scale, window=window, tiles=tiles
    )
