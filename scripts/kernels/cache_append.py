"""cache_append at the sizes of Llama-3-8B, and of Qwen3-8B with its norms, beside XLA's fusions and scatters."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_append import cache_append
from pallas_kernels.kv_pages import KVPages, abstract_pages, dequantize_tokens
from pallas_kernels.target import H200
from scripts.kernels.common import Case, Program

PAGES, KV_HEADS, Q_PER_KV, PAGE_SIZE, HEAD_DIM = 512, 8, 4, 64, 128
NORM_EPS = 1e-6
CACHES = {"bf16": (jnp.bfloat16, 0.003), "int8": (jnp.int8, 0.02), "fp8": (jnp.float8_e4m3fn, 0.05)}
"""And the largest error of a row that their steps explain."""
DECODE, PREFILL = (1, 32, 128, 256), (2048, 8192)
MOST_OF_XLA = {"bf16": 0.75, "int8": 0.65, "fp8": 0.65}


def cases() -> list[Case]:
    plain = [case(cache, tokens) for cache in CACHES for tokens in (*DECODE, *PREFILL)]
    return [*plain, case("bf16", 128, norm=True), case("int8", 128, norm=True)]


def case(cache: str, tokens: int, norm: bool = False) -> Case:
    dtype, tolerance = CACHES[cache]

    def program(implementation: str) -> Program:
        fn = functools.partial(append, implementation=implementation)
        return Program(fn, in_place={3: 1}, result=readable)

    token = KV_HEADS * HEAD_DIM
    stored = jnp.dtype(dtype).itemsize * 2 * token + (8 * KV_HEADS if cache != "bf16" else 0)
    return Case(
        name=f"{cache}{' norm' if norm else ''} T={tokens}",
        op="cache_append",
        inputs=functools.partial(inputs, dtype=dtype, tokens=tokens, norm=norm),
        programs={"mosaic": program("mosaic"), "xla": program("xla")},
        reference=reference,
        tolerance=tolerance,
        bytes=tokens * (2 * token * (Q_PER_KV + 2) + 2 * token * Q_PER_KV + stored),
        flops=tokens * 3 * token * (Q_PER_KV + 1),
        max_ratio=("xla", MOST_OF_XLA[cache]),
    )


def inputs(key: jax.Array, *, dtype: Any, tokens: int, norm: bool) -> tuple[Any, ...]:
    """Decoding: tokens on pages of their own. A prompt: one sequence from the middle of its first page on."""
    keys = jax.random.split(key, 6)
    qkv = jax.random.normal(keys[0], (tokens, KV_HEADS, Q_PER_KV + 2, HEAD_DIM), jnp.bfloat16)
    angles = jax.random.uniform(keys[1], (tokens, HEAD_DIM // 2), maxval=100.0)
    order = jax.random.permutation(keys[2], PAGES).astype(jnp.int32)
    if tokens in DECODE:
        page_ids, offsets = order[:tokens], jax.random.randint(keys[3], (tokens,), 0, PAGE_SIZE)
    else:
        positions = jnp.arange(tokens) + PAGE_SIZE // 2 + 5
        page_ids, offsets = order[positions // PAGE_SIZE], positions % PAGE_SIZE
    abstract = abstract_pages(PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype)
    pages = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract)
    norms = [1 + 0.2 * jax.random.normal(k, (HEAD_DIM,), jnp.bfloat16) if norm else None for k in keys[4:]]
    return qkv, jnp.cos(angles), jnp.sin(angles), pages, page_ids, offsets.astype(jnp.int32), *norms


def append(*arrays: Any, implementation: str) -> tuple[jax.Array, KVPages]:
    *arrays, q_norm, k_norm = arrays
    options = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": NORM_EPS, "target": H200}
    return cache_append(*arrays, **options, implementation=implementation)


def readable(output: tuple[jax.Array, KVPages]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values in float32, a vector of head_dim in each row."""
    q, pages = output
    v = pages.v.swapaxes(2, 3) if pages.v_transposed else pages.v
    k, v = (dequantize_tokens(x, s, jnp.float32) for x, s in ((pages.k, pages.k_scales), (v, pages.v_scales)))
    return q.astype(jnp.float32), k, v


def reference(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages,
    page_ids: jax.Array,
    offsets: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Nothing quantized; a pair of dimensions is turned as a complex number."""
    wide = qkv.astype(jnp.float32)

    def turned(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is not None:
            x = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + NORM_EPS) * scale.astype(jnp.float32)
        pair = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]) * (cos + 1j * sin)[:, None, None]
        return jnp.concatenate([pair.real, pair.imag], -1)

    empty = jnp.ones(pages.k.shape, jnp.float32)
    k, v = turned(wide[:, :, -2:-1], k_norm)[:, :, 0], wide[:, :, -1]
    k, v = (empty.at[page_ids, :, offsets].set(x) for x in (k, v))
    return turned(wide[:, :, :-2], q_norm), k, v
