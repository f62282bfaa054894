"""Small cases of every kernel in every option, each with what it is held to: for `check_kernels.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_append import cache_append
from pallas_kernels.formats import FORMATS, Format, QuantizedArray, dequantize, quantize
from pallas_kernels.fused_mlp import down, gate_up
from pallas_kernels.fused_mlp import reference as mlp_reference
from pallas_kernels.kv_pages import KVPages, abstract_pages, quantize_tokens
from pallas_kernels.moe import moe
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.target import H200
from scripts import eight_bit_checks
from scripts.check import Check
from scripts.kernels import cache_append as appends
from scripts.kernels import moe as experts
from scripts.kernels import quant_matmul as products
from scripts.kernels.fused_mlp import normal
from scripts.norm_checks import norm_matmuls

KV_HEADS = 2
TOLERANCE = {"bfloat16": 0.01, "float16": 2e-3, "int8": 0.02, "float8_e4m3fn": 0.02}
"""Of a row of attention, by what the cache holds: rounding explains as much."""
EPS = 1e-5


def checks() -> list[Check]:
    weights = [*quant_matmuls(), *mlps(), *quantized_mlps(), *moes()]
    return [*decodes(), *prefills(), *cache_appends(), *weights, *norms(), *norm_matmuls(), *eight_bit_checks.checks()]


def in_float32(fn: Callable[..., jax.Array], *arrays: Any, **options: Any) -> jax.Array:
    """An operation in plain JAX with nothing rounded on the way."""
    wide = [x.astype(jnp.float32) if isinstance(x, jax.Array) and x.dtype.itemsize == 2 else x for x in arrays]
    with jax.default_matmul_precision("highest"):
        return fn(*wide, **options, target=H200, implementation="xla")


# Attention


def decodes() -> list[Check]:
    case = decode
    plain = [
        case(head_dim=dim, group=group) for dim, group in ((64, 8), (80, 4), (96, 3), (128, 4), (192, 7), (256, 1))
    ]
    pages = [case(page_size=page, dtype=dtype) for page, dtype in ((16, "float16"), (32, "bfloat16"), (128, "float16"))]
    options: list[dict[str, Any]] = [
        {"window": 100},
        {"soft_cap": 3.0, "sinks": True},
        {"queries": 4, "window": 70, "sinks": True},
        {"queries": 8, "soft_cap": 3.0},
        {"queries": 8, "group": 16, "head_dim": 256, "page_size": 16},
    ]
    narrow: list[dict[str, Any]] = [
        {},
        {"head_dim": 64, "page_size": 32, "group": 16, "queries": 4},
        {"head_dim": 96, "page_size": 128, "window": 100, "sinks": True},
        {"head_dim": 192, "page_size": 32, "soft_cap": 3.0},
        {"head_dim": 256, "group": 1, "queries": 8, "window": 300},
        {"page_size": 16},
        {"head_dim": 80, "page_size": 16, "queries": 3, "window": 100},
        {"head_dim": 80, "group": 1, "sinks": True},
    ]
    wide = [case(**chosen) for chosen in options]
    return [*plain, *pages, *wide, *[case(dtype=d, **o) for d in ("int8", "float8_e4m3fn") for o in narrow]]


def decode(
    *,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    group: int = 4,
    page_size: int = 64,
    queries: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Check:
    lengths = (2500, queries, 0, page_size - 1 + queries, page_size, 700, 129)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        oldest = jnp.maximum(jnp.asarray(lengths) - queries + 1 - (window or 1 << 20), 0)
        pages, tables = cache(keys[0], dtype, head_dim, page_size, lengths, oldest)
        q = jax.random.normal(keys[1], (len(lengths), queries, KV_HEADS, group, head_dim), compute_dtype(dtype))
        logits = jax.random.normal(keys[2], (KV_HEADS, group)) + 2 if sinks else None
        return q, pages, tables, jnp.asarray(lengths, jnp.int32), logits

    options: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}

    def attend(*arrays: Any, implementation: str = "mosaic", target: Any = H200) -> jax.Array:
        *arrays, logits = arrays
        return paged_decode(*arrays, **options, sinks=logits, target=target, implementation=implementation)

    name = f"paged_decode {dtype} d={head_dim} page={page_size} group={group} queries={queries}"
    name += "".join(f" {k}={v}" for k, v in (("window", window), ("cap", soft_cap), ("sinks", sinks)) if v)
    return Check(name, inputs, attend, functools.partial(in_float32, attend), TOLERANCE[dtype])


def prefills() -> list[Check]:
    case = prefill
    plain = [case(head_dim=dim, group=group) for dim, group in ((64, 8), (80, 4), (96, 3), (192, 7), (256, 1))]
    options: list[dict[str, Any]] = [
        {"page_size": 16, "dtype": "float16"},
        {"page_size": 32, "window": 100},
        {"page_size": 128, "soft_cap": 3.0, "sinks": True},
        {"dtype": "int8"},
        {"dtype": "int8", "head_dim": 96, "page_size": 32, "window": 100},
        {"dtype": "int8", "head_dim": 80, "page_size": 32},
        {"dtype": "int8", "page_size": 16},
        {"dtype": "float8_e4m3fn", "head_dim": 80, "page_size": 16, "window": 100},
        {"dtype": "float8_e4m3fn", "head_dim": 64, "page_size": 128, "sinks": True},
        {"dtype": "float8_e4m3fn", "head_dim": 256, "group": 2, "soft_cap": 3.0},
        {"head_dim": 64, "group": 1, "causal": False},
    ]
    return [*plain, *[case(**chosen) for chosen in options]]


def prefill(
    *,
    dtype: str = "bfloat16",
    head_dim: int = 128,
    group: int = 4,
    page_size: int = 64,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Check:
    counts, lengths = (300, 1, 0, 129, 5), (700, 1, 0, 129, 900)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        pages, tables = cache(keys[0], dtype, head_dim, page_size, lengths, jnp.zeros(len(lengths), jnp.int32))
        q = jax.random.normal(keys[1], (sum(counts), KV_HEADS, group, head_dim), compute_dtype(dtype))
        logits = jax.random.normal(keys[2], (KV_HEADS, group)) + 2 if sinks else None
        starts = jnp.append(0, jnp.cumsum(jnp.asarray(counts))).astype(jnp.int32)
        return q, pages, tables, starts, jnp.asarray(lengths, jnp.int32), logits

    options: dict[str, Any] = {
        "scale": head_dim**-0.5,
        "causal": causal,
        "window": window,
        "soft_cap": soft_cap,
    }

    def attend(*arrays: Any, implementation: str = "mosaic", target: Any = H200) -> jax.Array:
        *arrays, logits = arrays
        return paged_prefill(*arrays, **options, sinks=logits, target=target, implementation=implementation)

    name = f"paged_prefill {dtype} d={head_dim} page={page_size} group={group}"
    named = (("window", window), ("cap", soft_cap), ("sinks", sinks), ("bidirectional", not causal))
    name += "".join(f" {k}={v}" for k, v in named if v)
    return Check(name, inputs, attend, functools.partial(in_float32, attend), TOLERANCE[dtype])


def compute_dtype(cache_dtype: str) -> str:
    return "float16" if cache_dtype == "float16" else "bfloat16"


def cache(
    key: jax.Array, dtype: str, head_dim: int, page_size: int, lengths: tuple[int, ...], oldest: jax.Array
) -> tuple[KVPages, jax.Array]:
    """Pages of sequences anywhere in a pool, NaN in slots past their lengths and before `oldest`; block tables."""
    needed = [-(-length // page_size) for length in lengths]
    width, total = max(needed), sum(needed) + 1
    order_key, *keys = jax.random.split(key, 3)
    order = jax.random.permutation(order_key, total).astype(jnp.int32)
    firsts = jnp.cumsum(jnp.asarray([0, *needed[:-1]]))[:, None]
    column = jnp.arange(width)
    tables = jnp.where(column < jnp.asarray(needed)[:, None], order[(firsts + column) % total], order[-1])
    position = jnp.arange(width * page_size)
    live = (position < jnp.asarray(lengths)[:, None]) & (position >= oldest[:, None])
    slots = jnp.zeros((total, page_size), bool)
    slots = slots.at[tables[:, position // page_size], position % page_size].max(live)[:, None]
    shape = (total, KV_HEADS, page_size, head_dim)
    k, v = (jax.random.normal(each, shape, compute_dtype(dtype)) for each in keys)
    if not abstract_pages(1, 1, page_size, head_dim, dtype).quantized:
        return KVPages(*(jnp.where(slots[..., None], x, jnp.nan) for x in (k, v))), tables
    (k, k_scales), (v, v_scales) = (quantize_tokens(x, dtype) for x in (k, v))
    k_scales, v_scales = (jnp.where(slots, scales, jnp.nan) for scales in (k_scales, v_scales))
    return KVPages(k, v.swapaxes(-1, -2), k_scales, v_scales, v_transposed=True), tables


def cache_appends() -> list[Check]:
    def check(dtype: str, tokens: int, head_dim: int, pairs: int, group: int, norm: bool) -> Check:
        def inputs(key: jax.Array) -> tuple[Any, ...]:
            keys = jax.random.split(key, 5)
            pages = jax.tree.map(
                lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract_pages(40, KV_HEADS, 32, head_dim, dtype)
            )
            qkv = jax.random.normal(keys[0], (tokens, KV_HEADS, group + 2, head_dim), compute_dtype(dtype))
            angles = jax.random.uniform(keys[1], (tokens, pairs), maxval=100.0)
            slots = jnp.arange(tokens) + 13 if tokens > 100 else jax.random.permutation(keys[2], 40 * 32)[:tokens]
            scales = [1 + 0.2 * jax.random.normal(each, (head_dim,), qkv.dtype) for each in keys[3:]]
            places = ((slots // 32).astype(jnp.int32), (slots % 32).astype(jnp.int32))
            return qkv, jnp.cos(angles), jnp.sin(angles), pages, *places, *(scales if norm else (None, None))

        def append(*arrays: Any, implementation: str = "mosaic") -> Any:
            *arrays, q_norm, k_norm = arrays
            options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": EPS, "target": H200}
            return appends.readable(cache_append(*arrays, **options, implementation=implementation))

        def reference(qkv: jax.Array, cos: jax.Array, sin: jax.Array, pages: KVPages, *rest: Any) -> Any:
            ones = jnp.ones(pages.k.shape, jnp.float32)
            wide = KVPages(ones, ones)
            return append(qkv.astype(jnp.float32), cos, sin, wide, *rest, implementation="xla")

        name = f"cache_append {dtype} tokens={tokens} d={head_dim} pairs={pairs} group={group}{' norm' * norm}"
        tolerance = {"bfloat16": 5e-3, "float16": 1e-3, "int8": 0.02, "float8_e4m3fn": 0.05}[dtype]
        return Check(name, inputs, append, reference, tolerance)

    return [
        check("bfloat16", 9, 128, 64, 4, True),
        check("float16", 1, 80, 40, 1, False),
        check("bfloat16", 300, 256, 32, 8, False),
        check("int8", 33, 96, 48, 3, False),
        check("int8", 700, 128, 64, 4, True),
        check("float8_e4m3fn", 64, 64, 16, 16, True),
        check("float8_e4m3fn", 401, 192, 96, 1, False),
    ]


# Weights


def quant_matmuls() -> list[Check]:
    small, tall = (1024, 1536), (4096, 3072)
    cases = [products.case(format, rows, shape) for format in FORMATS for rows, shape in ((5, small), (200, tall))]
    cases += [products.case("int4", 16, small, symmetric=False), products.case("int8", 1, tall)]
    return [Check(c.full_name, c.inputs, c.programs["mosaic"].fn, c.reference, c.tolerance) for c in cases]


def mlps() -> list[Check]:
    def inputs(key: jax.Array, tokens: int, embed: int, mlp: int, bias: bool, into: bool) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)
        weight = normal(keys[1], *((embed, 2, mlp) if into else (mlp, embed)), size=embed**-0.5)
        rest = None if into else normal(keys[2], tokens, embed)
        added = normal(keys[3], *((2, mlp) if into else (embed,))) if bias else None
        return normal(keys[0], tokens, embed if into else mlp), weight, *(() if into else (rest,)), added

    def check(tokens: int, embed: int, mlp: int, activation: str | None, bias: bool = False) -> Check:
        """activation: None for `down`."""
        make = functools.partial(inputs, tokens=tokens, embed=embed, mlp=mlp, bias=bias, into=activation is not None)
        options: dict[str, Any] = {} if activation is None else {"activation": activation}
        op, reference = (down, mlp_reference.down) if activation is None else (gate_up, mlp_reference.gate_up)
        name = f"fused_mlp {activation or 'down'} {embed}x{mlp} tokens={tokens}{' bias' * bias}"
        kernel = functools.partial(op, target=H200, implementation="mosaic", **options)
        return Check(name, make, kernel, functools.partial(reference, **options), 8e-3)

    return [
        check(1, 1024, 2816, "silu"),
        check(40, 512, 1024, "gelu_tanh", bias=True),
        check(300, 1024, 1536, "silu"),
        check(129, 512, 1024, "clamped_silu", bias=True),
        check(1, 512, 4096, None),
        check(37, 1024, 2816, None, bias=True),
        check(65, 4096, 4096, None, bias=True),
        check(127, 6144, 4096, None, bias=True),
        check(128, 4096, 14336, None),
        check(200, 6144, 4096, None),
        check(256, 4096, 4096, None, bias=True),
    ]


def quantized_mlps() -> list[Check]:
    """Gate and up in 8 and 4 bits, the activation behind them; few outputs are those of one of several devices."""

    def check(format: Format, tokens: int, embed: int, mlp: int) -> Check:
        def inputs(key: jax.Array) -> tuple[Any, ...]:
            weight = normal(key, embed, 2, mlp, size=embed**-0.5)
            return normal(jax.random.fold_in(key, 1), tokens, embed), quantize(weight, format)

        def reference(x: jax.Array, weight: QuantizedArray) -> jax.Array:
            wide = jnp.moveaxis(dequantize(weight, jnp.float32), -1, 0)
            return mlp_reference.gate_up(x, wide, activation="silu")

        kernel = functools.partial(gate_up, activation="silu", target=H200, implementation="mosaic")
        return Check(f"fused_mlp {format} silu {embed}x{mlp} tokens={tokens}", inputs, kernel, reference, 1e-2)

    few, many = (4096, 1792), (4096, 14336)
    return [
        check("int8", 1, *few),
        check("int8", 200, *few),
        check("fp8", 12, *many),
        check("int4", 16, *few),
        check("int4", 256, *many),
    ]


def moes() -> list[Check]:
    def check(format: Any, tokens: int, model: experts.Model) -> Check:
        make = functools.partial(experts.make_inputs, model=model, tokens=tokens, format=format)
        kernel = functools.partial(moe, target=H200, implementation="mosaic")
        name = f"moe {format} tokens={tokens} {model.experts} experts of {model.embed}x{model.mlp}"
        return Check(name, make, kernel, experts.reference, 1e-2)

    few, many = experts.Model(8, 2, 1024, 1536), experts.Model(32, 4, 512, 768)
    return [
        *(check(format, 5, few) for format in ("bf16", *FORMATS)),
        *(check(format, 700, many) for format in ("bf16", *FORMATS)),
        check("mxfp4", 5, experts.Model(8, 2, 2880, 1472)),  # which 64 divides and 128 does not
        check("mxfp4", 700, many),
    ]


# Rows


def norms() -> list[Check]:
    def inputs(key: jax.Array, rows: int, embed: int, dtype: str) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        x, delta = (3 * jax.random.normal(each, (rows, embed), dtype) for each in keys[:2])
        return x, delta, 1 + 0.2 * jax.random.normal(keys[2], (embed,), dtype)

    def both(x: jax.Array, delta: jax.Array, scale: jax.Array, implementation: str = "mosaic") -> tuple[jax.Array, ...]:
        options: dict[str, Any] = {"eps": EPS, "target": H200, "implementation": implementation}
        return rms_norm(x, scale, **options), *add_rms_norm(x, delta, scale, **options)

    def reference(x: jax.Array, delta: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        wide = (y.astype(jnp.float32) for y in (x, x + delta, scale))
        first, second, factor = wide
        unit = [y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPS) * factor for y in (first, second)]
        return unit[0], second, unit[1]

    sizes = ((1, 4096, "bfloat16"), (77, 2048, "float16"), (300, 8192, "bfloat16"), (3, 16384, "bfloat16"))
    return [
        Check(
            f"rms_norm {dtype} {rows}x{embed}",
            functools.partial(inputs, rows=rows, embed=embed, dtype=dtype),
            both,
            reference,
            5e-3,
        )
        for rows, embed, dtype in sizes
    ]
