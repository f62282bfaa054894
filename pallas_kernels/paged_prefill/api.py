"""Checks the arguments of paged_prefill and picks the implementation."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import choice, tiles
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_prefill import xla
from pallas_kernels.target import CPU, Target


def paged_prefill(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    query_start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    plan: Any = None,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """Causal attention of each sequence's newest tokens over its cache, themselves included (append first).

    q: [tokens, kv_heads, q_per_kv, head_dim], the chunks one after another; query_start: [batch + 1] i32, where each
    sequence's rows start and the last one's end; lengths: [batch] i32, tokens in the cache, so that the last row of a
    chunk is at position length - 1. block_tables: [batch, width] i32; window: how many tokens back a query sees, itself
    included; soft_cap: scores become soft_cap * tanh(score / soft_cap); sinks: [kv_heads, q_per_kv] f32, per query head
    the score of one more key whose value is zero. Returns the shape of q, zero for rows of no sequence. Slots past a
    length, and pages of no sequence, may hold anything.
    Raises ValueError if shapes disagree.
    """
    pages.check()
    choice.check_shape("q", q, (None, pages.kv_heads, None, pages.head_dim))
    batch, q_per_kv = lengths.shape[0], q.shape[2]
    choice.check_shape("block_tables", block_tables, (batch, None))
    choice.check_shape("query_start", query_start, (batch + 1,))
    if sinks is not None:
        choice.check_shape("sinks", sinks, (pages.kv_heads, q_per_kv))
    choice.check_window(window)
    choice.resolve("paged_prefill", implementation, target.lacks_hopper() or "it has no kernel yet")
    return xla.paged_prefill(
        q,
        pages,
        block_tables,
        query_start,
        lengths,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        tiles=tiles.for_platform(target.platform),
    )
