"""paged_prefill at the sizes of Llama-3-8B: whole prompts, a chunk at depth, a chunk among decoding sequences."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pages import KVPages, abstract_pages, dequantize_tokens, quantize_tokens
from pallas_kernels.paged_prefill import make_plan, paged_prefill
from pallas_kernels.target import H200
from scripts.kernels.common import Case, Program

KV_HEADS, Q_PER_KV, PAGE_SIZE, HEAD_DIM = 8, 4, 64, 128
SCALE = HEAD_DIM**-0.5
CACHES = {"bf16": (jnp.bfloat16, 0.01), "int8": (jnp.int8, 0.02), "fp8": (jnp.float8_e4m3fn, 0.02)}
"""And the largest error of a row that rounding explains."""
# (count, length) of each sequence, target in TFLOP/s of a bf16 cache
CHUNKS: dict[str, tuple[list[tuple[int, int]], float | None]] = {
    "T=8192": ([(8192, 8192)], 560),
    "T=2048": ([(2048, 2048)], 380),
    "512 at 32k": ([(512, 32768)], 400),
    "4 of 2048": ([(2048, 2048)] * 4, None),
    "512 and 64 decoding at 2048": ([(512, 2048)] + [(1, 2048)] * 64, None),
}


def cases() -> list[Case]:
    return [case(cache, name) for cache in CACHES for name in CHUNKS]


def case(cache: str, name: str) -> Case:
    dtype, tolerance = CACHES[cache]
    chunks, target = CHUNKS[name]
    tokens = sum(count for count, _ in chunks)
    cached = sum(length for _, length in chunks)
    programs = {"mosaic": Program(functools.partial(planned, target=H200, implementation="mosaic"), prepare=plan)}
    if cache == "bf16" and len(chunks) == 1 and chunks[0][0] == chunks[0][1]:
        programs["cudnn contiguous"] = Program(cudnn, prepare=contiguous, autotuned=True)
    stored = jnp.dtype(dtype).itemsize * 2 * HEAD_DIM + (8 if cache != "bf16" else 0)
    return Case(
        name=f"{cache} {name}",
        op="paged_prefill",
        inputs=functools.partial(inputs, dtype=dtype, chunks=tuple(chunks)),
        programs=programs,
        reference=reference,
        tolerance=tolerance,
        bytes=KV_HEADS * (4 * tokens * Q_PER_KV * HEAD_DIM + cached * stored),
        # A row of a chunk sees the keys before the chunk and those of the chunk up to itself.
        flops=sum(2 * KV_HEADS * Q_PER_KV * HEAD_DIM * count * (2 * length - count + 1) for count, length in chunks),
        min_tflops=target if cache == "bf16" else None,
    )


def inputs(key: jax.Array, *, dtype: Any, chunks: tuple[tuple[int, int], ...]) -> tuple[Any, ...]:
    """q, pages anywhere in the pool, block tables, query_start, lengths."""
    keys = jax.random.split(key, 4)
    counts, lengths = (jnp.asarray(x, jnp.int32) for x in zip(*chunks, strict=True))
    needed = [-(-length // PAGE_SIZE) for _, length in chunks]
    width, total = max(needed), sum(needed)
    order = jax.random.permutation(keys[0], total).astype(jnp.int32)
    firsts = jnp.cumsum(jnp.asarray([0, *needed[:-1]]))
    tables = order[jnp.minimum(firsts[:, None] + jnp.arange(width), total - 1)]
    k, v = (jax.random.normal(x, (total, KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.bfloat16) for x in keys[1:3])
    pages = KVPages(k, v)
    if abstract_pages(1, 1, PAGE_SIZE, HEAD_DIM, dtype).quantized:
        (k, k_scales), (v, v_scales) = (quantize_tokens(x, dtype) for x in (k, v))
        pages = KVPages(k, v.swapaxes(-1, -2), k_scales, v_scales, v_transposed=True)
    q = jax.random.normal(keys[3], (sum(count for count, _ in chunks), KV_HEADS, Q_PER_KV, HEAD_DIM), jnp.bfloat16)
    return q, pages, tables, jnp.append(0, jnp.cumsum(counts)).astype(jnp.int32), lengths


def plan(q: jax.Array, pages: KVPages, tables: jax.Array, query_start: jax.Array, lengths: jax.Array) -> Any:
    """The plan of a step is made once, for all layers."""
    made = make_plan(query_start, lengths, tokens=q.shape[0], q_per_kv=q.shape[2])
    return q, pages, tables, query_start, lengths, made


def planned(*arrays: Any, **options: Any) -> jax.Array:
    *rest, made = arrays
    return paged_prefill(*rest, scale=SCALE, plan=made, **options)


def flat(pages: KVPages, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of one sequence, [kv_heads, tokens, head_dim] f32."""
    v = pages.v.swapaxes(-1, -2) if pages.v_transposed else pages.v
    both = ((pages.k, pages.k_scales), (v, pages.v_scales))
    wide = [dequantize_tokens(x[table], s if s is None else s[table], jnp.float32) for x, s in both]
    k, v = (x.swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM) for x in wide)
    return k, v


def reference(q: jax.Array, pages: KVPages, tables: jax.Array, query_start: jax.Array, lengths: jax.Array) -> jax.Array:
    """Row by row in float32, a few at a time."""
    rows = jnp.arange(q.shape[0])
    sequence = jnp.searchsorted(query_start, rows, side="right") - 1
    position = lengths[sequence] - (query_start[sequence + 1] - rows)

    def attend(out: jax.Array, b: jax.Array) -> tuple[jax.Array, None]:
        k, v = flat(pages, tables[b])

        def row(x: tuple[jax.Array, jax.Array]) -> jax.Array:
            query, last = x
            s = jnp.einsum("kgd,ksd->kgs", query.astype(jnp.float32), k, precision="highest") * SCALE
            weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[1]) <= last, s, -jnp.inf), axis=-1)
            return jnp.einsum("kgs,ksd->kgd", weights, v, precision="highest")

        # Rows of other sequences see one key, and are not kept.
        mine = sequence == b
        new = jax.lax.map(row, (q, jnp.where(mine, position, 0)), batch_size=32)
        return jnp.where(mine[:, None, None, None], new, out), None

    return jax.lax.scan(attend, jnp.zeros(q.shape, jnp.float32), jnp.arange(len(lengths)))[0]


def contiguous(q: jax.Array, pages: KVPages, tables: jax.Array, *_: Any) -> tuple[jax.Array, ...]:
    """What cuDNN takes: [1, tokens, heads, head_dim] each."""
    k, v = (x.swapaxes(0, 1)[None].astype(q.dtype) for x in flat(pages, tables[0]))
    return q.reshape(1, q.shape[0], -1, HEAD_DIM), k, v


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    out = jax.nn.dot_product_attention(q, k, v, scale=SCALE, is_causal=True, implementation="cudnn")
    return out.reshape(-1, KV_HEADS, Q_PER_KV, HEAD_DIM)
