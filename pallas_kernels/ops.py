"""What runs where: the choice of every operation, in the shapes of a Llama-3-8B layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice, formats, kv_pages
from pallas_kernels.cache_append import cache_append
from pallas_kernels.fused_mlp import fused_mlp
from pallas_kernels.moe import moe
from pallas_kernels.norm_matmul import Norm, norm_gate_up, norm_projection
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.target import Target

EMBED, MLP, KV_HEADS, Q_PER_KV, HEAD_DIM = 4096, 14336, 8, 4, 128
PAGES, PAGE_SIZE, WIDTH = 4096, 64, 32
EXPERTS, TOP_K = 8, 2
DECODE, PREFILL = 64, 2048
"""Tokens of a step."""
CACHE_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")


def decisions(target: Target) -> list[tuple[str, choice.Decision]]:
    """(Which shapes, what runs there), for every operation. Traces each, and computes nothing."""
    found = []
    for case, op, args in _examples():
        with choice.recorded() as made:
            jax.eval_shape(functools.partial(op, target=target), *args)
        found += [(case, decision) for decision in made]
    return found


def _examples() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    tables, lengths = _array((DECODE, WIDTH), jnp.int32), _array((DECODE,), jnp.int32)
    starts = _array((DECODE + 1,), jnp.int32)
    for dtype in CACHE_DTYPES:
        pages = kv_pages.abstract_pages(PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype)
        name, scale = f"{dtype} cache", HEAD_DIM**-0.5
        turns = (_array((DECODE, HEAD_DIM // 2), jnp.float32),) * 2
        yield name, cache_append, (_heads(DECODE, Q_PER_KV + 2), *turns, pages, lengths, lengths)
        decode, prefill = functools.partial(paged_decode, scale=scale), functools.partial(paged_prefill, scale=scale)
        yield name, decode, (_heads(DECODE, Q_PER_KV), pages, tables, lengths)
        yield name, prefill, (_heads(PREFILL, Q_PER_KV), pages, tables, starts, lengths)
    for tokens in (DECODE, PREFILL):
        name, x = f"{tokens} tokens", _array((tokens, EMBED))
        for format in formats.FORMATS:
            weight = jax.eval_shape(functools.partial(formats.quantize, format=format), _array((EMBED, MLP)))
            yield f"{name}, {format} weight", quant_matmul, (x, weight)
            if format in formats.ROW_DTYPES:
                rows = jax.eval_shape(functools.partial(quantize_rows, format=format), x)
                yield f"{name}, {format} both", quant_matmul, (rows, weight)
        yield name, functools.partial(quantize_rows, format="int8"), (x,)
        yield name, functools.partial(add_rms_norm, eps=1e-6), (x, x, _array((EMBED,)))
        yield name, fused_mlp, (x, _array((EMBED, 2, MLP)), _array((MLP, EMBED)))
        routes = _array((tokens, TOP_K), jnp.int32), _array((tokens, TOP_K), jnp.float32)
        experts = _array((EXPERTS, EMBED, 2, MLP)), _array((EXPERTS, MLP, EMBED))
        yield f"{name}, {EXPERTS} experts", moe, (x, *routes, *experts)
    x = _array((1, EMBED))
    yield (
        "1 token",
        _normed(norm_projection),
        (x, x, _array((EMBED,)), _array((EMBED, KV_HEADS, Q_PER_KV + 2, HEAD_DIM))),
    )
    yield "1 token", _normed(norm_gate_up), (x, x, _array((EMBED,)), _array((EMBED, 2, MLP)))


def _normed(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, delta, scale, weight, target: op(x, Norm(scale, delta, 1e-6), weight, target=target)


def _array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _heads(tokens: int, heads: int) -> jax.ShapeDtypeStruct:
    return _array((tokens, KV_HEADS, heads, HEAD_DIM))
