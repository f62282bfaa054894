"""Checks the arguments of paged_prefill and picks the implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice, tiles
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_decode.api import NO_ALIBI, NO_CHUNKS
from pallas_kernels.paged_prefill import config, kernel, xla
from pallas_kernels.paged_prefill.plan import Plan, make_plan
from pallas_kernels.target import CPU, Target

PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def paged_prefill(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    query_start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    causal: bool = True,
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

    q: [tokens, kv_heads, q_per_kv, head_dim], the sequences' rows one after another; query_start: [batch + 1] i32,
    where each sequence's rows start and the last one's end; lengths: [batch] i32, tokens in the cache, so that a
    sequence's last row is at position length - 1. block_tables: [batch, width] i32; causal: a query sees tokens up to
    itself; else all of its sequence, which leaves no room for a window, chunks or ALiBi; window: how many tokens back a
    query sees, itself included; chunk: positions come in chunks of so many, and a query sees none before its own
    (Llama 4); soft_cap: scores become soft_cap * tanh(score / soft_cap); sinks: [kv_heads, q_per_kv] f32, per query
    head the score of one more key whose value is zero; alibi_slopes: [kv_heads, q_per_kv] f32, how much a score falls
    with every token between query and key (Press et al. 2022), after the soft cap. Returns the shape of q, zero for
    rows of no sequence. Slots past a length, pages of no sequence, and those that no query sees, may hold anything.
    plan: of `make_plan` with these tokens, query_start and lengths, which the layers of a step share; None: made here.
    interpret: for the kernel, an InterpretGPUParams to run it on any machine.
    Raises ValueError if shapes disagree.
    """
    pages.check()
    choice.check_shape("q", q, (None, pages.kv_heads, None, pages.head_dim))
    batch, q_per_kv = lengths.shape[0], q.shape[2]
    choice.check_shape("block_tables", block_tables, (batch, None))
    choice.check_shape("query_start", query_start, (batch + 1,))
    if sinks is not None:
        choice.check_shape("sinks", sinks, (pages.kv_heads, q_per_kv))
    if alibi_slopes is not None:
        choice.check_shape("alibi_slopes", alibi_slopes, (pages.kv_heads, q_per_kv))
    choice.check_window(window)
    choice.check_window(chunk, "chunk")
    if not causal and (window, chunk, alibi_slopes) != (None, None, None):
        raise ValueError("windows, chunks and ALiBi look back only; they go with causal=True")
    lacks = (NO_ALIBI if alibi_slopes is not None else None) or (NO_CHUNKS if chunk is not None else None)
    chosen = choice.resolve("paged_prefill", implementation, obstacle(q, pages, target) or lacks)
    options: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if chosen == "xla":
        sizes = tiles.for_platform(target.platform)
        return xla.paged_prefill(
            q, pages, block_tables, query_start, lengths, **options, chunk=chunk, alibi_slopes=alibi_slopes, tiles=sizes
        )
    plan = plan or make_plan(query_start, lengths, tokens=q.shape[0], q_per_kv=q_per_kv)
    options |= {"config": config.choose(q_per_kv, pages.head_dim, pages.dtype), "cores": target.cores}
    return kernel.paged_prefill(q, pages, block_tables, plan, **options, interpret=interpret)


def obstacle(q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, target: Target) -> str | None:
    """Why the kernel cannot run; None if it can, and then it wins. Of q only shape and dtype count."""
    if reason := target.lacks_hopper():
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype.name}, and matrix units take bfloat16 or float16"
    if not pages.quantized and pages.dtype != q.dtype:
        return f"the cache is {pages.dtype.name} and q is {q.dtype.name}"
    if pages.quantized and not pages.v_transposed:
        return "the 8-bit values have head_dim innermost, and the kernel reads them with their tokens innermost"
    if pages.shared:
        return "the keys are the values, too, and the kernel reads two pools"
    if pages.page_size not in PAGE_SIZES:
        return f"a page holds {pages.page_size} tokens, and the kernel reads pages of {PAGE_SIZES}"
    if pages.head_dim not in HEAD_DIMS:
        return f"head_dim is {pages.head_dim}, and the kernel is built for {HEAD_DIMS}"
    return None
