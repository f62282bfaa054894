"""paged_decode at the sizes of Llama-3-8B: batches of one length, mixed lengths, one long sequence among short ones."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pages import KVPages, abstract_pages, dequantize_tokens, quantize_tokens
from pallas_kernels.paged_decode import make_plan, paged_decode
from pallas_kernels.target import H200
from scripts.kernels.common import Case, Program

KV_HEADS, Q_PER_KV, PAGE_SIZE, HEAD_DIM = 8, 4, 64, 128
SCALE = HEAD_DIM**-0.5
CACHES = {"bf16": (jnp.bfloat16, 0.01), "int8": (jnp.int8, 0.02), "fp8": (jnp.float8_e4m3fn, 0.02)}
"""And the largest error of a row that rounding explains."""
MIXED = random.Random(0).choices(range(1, 4097), k=64)
# Lengths; share of the read ceiling to reach with a bf16 cache, and with an 8-bit one
BATCHES: dict[str, tuple[list[int], float | None, float | None]] = {
    "128x2048": ([2048] * 128, 0.96, 0.88),
    "64x1024": ([1024] * 64, 0.90, 0.80),
    "1x131072": ([131072], 0.94, 0.86),
    "8x2048": ([2048] * 8, 0.72, None),
    "1x8192": ([8192], 0.65, None),
    "64 of 1..4096": (MIXED, 0.92, None),
    "100k and 63x500": ([100_000] + [500] * 63, 0.88, None),
}


def cases() -> list[Case]:
    return [case(cache, name) for cache in CACHES for name in BATCHES]


def case(cache: str, name: str) -> Case:
    dtype, tolerance = CACHES[cache]
    lengths, wide_target, narrow_target = BATCHES[name]
    programs = {
        "mosaic": Program(functools.partial(planned, target=H200, implementation="mosaic"), prepare=plan),
        "xla": Program(functools.partial(paged_decode, scale=SCALE, target=H200, implementation="xla"), autotuned=True),
    }
    if cache == "bf16" and len(set(lengths)) == 1:
        programs["cudnn contiguous"] = Program(cudnn, prepare=contiguous, autotuned=True)
    token = jnp.dtype(dtype).itemsize * 2 * HEAD_DIM + (8 if cache != "bf16" else 0)
    return Case(
        name=f"{cache} {name}",
        op="paged_decode",
        inputs=functools.partial(inputs, dtype=dtype, lengths=tuple(lengths)),
        programs=programs,
        reference=reference,
        tolerance=tolerance,
        bytes=KV_HEADS * (sum(lengths) * token + 4 * len(lengths) * Q_PER_KV * HEAD_DIM),
        flops=4 * KV_HEADS * Q_PER_KV * HEAD_DIM * sum(lengths),
        min_share=wide_target if cache == "bf16" else narrow_target,
    )


def inputs(key: jax.Array, *, dtype: Any, lengths: tuple[int, ...]) -> tuple[Any, ...]:
    """q, pages anywhere in the pool, block tables, lengths."""
    keys = jax.random.split(key, 4)
    needed = [-(-length // PAGE_SIZE) for length in lengths]
    width, total = max(needed), sum(needed)
    order = jax.random.permutation(keys[0], total).astype(jnp.int32)
    firsts = jnp.cumsum(jnp.asarray([0, *needed[:-1]]))
    tables = order[jnp.minimum(firsts[:, None] + jnp.arange(width), total - 1)]
    k, v = (jax.random.normal(x, (total, KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.bfloat16) for x in keys[1:3])
    pages = KVPages(k, v)
    if abstract_pages(1, 1, PAGE_SIZE, HEAD_DIM, dtype).quantized:
        (k, k_scales), (v, v_scales) = (quantize_tokens(x, dtype) for x in (k, v))
        pages = KVPages(k, v.swapaxes(-1, -2), k_scales, v_scales, v_transposed=True)
    q = jax.random.normal(keys[3], (len(lengths), KV_HEADS, Q_PER_KV, HEAD_DIM), jnp.bfloat16)
    return q, pages, tables, jnp.asarray(lengths, jnp.int32)


def plan(q: jax.Array, pages: KVPages, tables: jax.Array, lengths: jax.Array) -> tuple[Any, ...]:
    """The plan of a step is made once, for all layers."""
    made = make_plan(lengths, tables, pages, q_dtype=q.dtype, q_per_kv=Q_PER_KV, target=H200, implementation="mosaic")
    return q, pages, tables, lengths, made


def planned(*arrays: Any, **options: Any) -> jax.Array:
    *rest, made = arrays
    return paged_decode(*rest, scale=SCALE, plan=made, **options)


def flat(pages: KVPages, table: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values of one sequence, [kv_heads, tokens, head_dim] each."""
    v = pages.v.swapaxes(-1, -2) if pages.v_transposed else pages.v
    both = ((pages.k, pages.k_scales), (v, pages.v_scales))
    wide = [dequantize_tokens(x[table], s if s is None else s[table], dtype) for x, s in both]
    k, v = (x.swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM) for x in wide)
    return k, v


def reference(q: jax.Array, pages: KVPages, tables: jax.Array, lengths: jax.Array) -> jax.Array:
    """One sequence after the other in float32."""

    def attend(x: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, table, length = x
        k, v = flat(pages, table, jnp.float32)
        s = jnp.einsum("kgd,ksd->kgs", query.astype(jnp.float32), k, precision="highest") * SCALE
        weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[1]) < length, s, -jnp.inf), axis=-1)
        return jnp.einsum("kgs,ksd->kgd", weights, v, precision="highest")

    return jax.lax.map(attend, (q, tables, lengths))


def contiguous(q: jax.Array, pages: KVPages, tables: jax.Array, lengths: jax.Array) -> tuple[jax.Array, ...]:
    """What cuDNN takes: [batch, tokens, heads, head_dim] each."""
    k, v = jax.vmap(lambda table: flat(pages, table, q.dtype))(tables)
    flat_q = q.reshape(q.shape[0], 1, KV_HEADS * Q_PER_KV, HEAD_DIM)
    return flat_q, k.swapaxes(1, 2), v.swapaxes(1, 2), lengths


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    out = jax.nn.dot_product_attention(q, k, v, scale=SCALE, key_value_seq_lengths=lengths, implementation="cudnn")
    return out.reshape(q.shape[0], KV_HEADS, Q_PER_KV, HEAD_DIM)
