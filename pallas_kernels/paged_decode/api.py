"""Checks the arguments of paged_decode and picks the implementation."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import choice, tiles
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_decode import config, kernel, xla
from pallas_kernels.paged_decode.plan import Plan, divide
from pallas_kernels.target import CPU, Target

MOST_QUERIES = 8
NO_ALIBI = "it adds no ALiBi to the scores"
NO_CHUNKS = "it knows windows, not chunks"


def paged_decode(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    plan: Plan | None = None,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """Attention of each sequence's newest tokens over its cache, themselves included (append first).

    q: [batch, kv_heads, q_per_kv, head_dim], one token a sequence, or [batch, queries, kv_heads, q_per_kv, head_dim],
    the newest `queries` <= 8, each seeing those before it. block_tables: [batch, width] i32, the pages of each sequence
    in order; lengths: [batch] i32, tokens in the cache; window: how many tokens back a query sees, itself included;
    chunk: positions come in chunks of so many, and a query sees none before its own (Llama 4); soft_cap: scores become
    soft_cap * tanh(score / soft_cap); sinks: [kv_heads, q_per_kv] f32, per query head the score of one more key whose
    value is zero; alibi_slopes: [kv_heads, q_per_kv] f32, how much a score falls with every token between query and key
    (Press et al. 2022), after the soft cap. Returns the shape of q, zero where a query sees nothing. Slots past a
    length, pages of no sequence, and those that no query sees, may hold anything.
    plan: from `make_plan`, to share among layers; None computes it here.
    interpret: reaches the kernel only.
    Raises ValueError if shapes disagree.
    """
    single = q.ndim == 4
    q = q[:, None] if single else q
    pages.check()
    choice.check_shape("q", q, (None, None, pages.kv_heads, None, pages.head_dim))
    batch, queries, kv_heads, q_per_kv, _ = q.shape
    if not 1 <= queries <= MOST_QUERIES:
        raise ValueError(
            f"q has {queries} queries a sequence; paged_decode takes 1 to {MOST_QUERIES}, paged_prefill any"
        )
    choice.check_shape("block_tables", block_tables, (batch, None))
    choice.check_shape("lengths", lengths, (batch,))
    if sinks is not None:
        choice.check_shape("sinks", sinks, (kv_heads, q_per_kv))
    if alibi_slopes is not None:
        choice.check_shape("alibi_slopes", alibi_slopes, (kv_heads, q_per_kv))
    choice.check_window(window)
    choice.check_window(chunk, "chunk")
    lacks = (NO_ALIBI if alibi_slopes is not None else None) or (NO_CHUNKS if chunk is not None else None)
    obstacle = config.obstacle(q.dtype, pages, target) or lacks
    if choice.resolve("paged_decode", implementation, obstacle) == "mosaic":
        if plan is None:
            plan = divide(lengths, block_tables, config.choose(queries, q_per_kv, pages, target), window)
        check_plan(plan, queries, kv_heads, q_per_kv, batch, window)
        # A kv head's query vectors side by side; one query token needs no transposition.
        rows = q.swapaxes(1, 2).reshape(batch, kv_heads, queries * q_per_kv, -1)
        out = kernel.attend(rows, pages, block_tables, plan, sinks, scale=scale, soft_cap=soft_cap, interpret=interpret)
        out = out.reshape(batch, kv_heads, queries, q_per_kv, -1).swapaxes(1, 2)
    else:
        out = xla.paged_decode(
            q,
            pages,
            block_tables,
            lengths,
            scale=scale,
            window=window,
            chunk=chunk,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            tiles=tiles.for_platform(target.platform),
        )
    return out[:, 0] if single else out


def make_plan(
    lengths: jax.Array,
    block_tables: jax.Array,
    pages: KVPages,
    *,
    q_dtype: Any,
    q_per_kv: int,
    queries: int = 1,
    window: int | None = None,
    target: Target = CPU,
    implementation: choice.Implementation = None,
) -> Plan | None:
    """What `paged_decode` computes from lengths and tables alone: once per step for all layers of one shape and window.

    lengths: [batch] i32; block_tables: [batch, width] i32; pages: any layer's, only its shapes count. None where
    `paged_decode` would not use it.
    """
    obstacle = config.obstacle(q_dtype, pages, target)
    if choice.resolve("paged_decode", implementation, obstacle) != "mosaic":
        return None
    return divide(lengths, block_tables, config.choose(queries, q_per_kv, pages, target), window)


def check_plan(plan: Plan, queries: int, kv_heads: int, q_per_kv: int, batch: int, window: int | None) -> None:
    """ValueError if a plan is for other shapes."""
    sizes = plan.config
    made = (sizes.queries, sizes.kv_heads, sizes.q_per_kv, plan.sequences.shape[0], plan.window)
    given = (queries, kv_heads, q_per_kv, batch, window)
    if made != given:
        names = "(queries, kv_heads, q_per_kv, batch, window)"
        raise ValueError(f"plan is for {names} = {made}; the arguments have {given}: make one plan for each shape")
