"""quantize_rows, alone and behind the norm of a sum, at the sizes of Llama-3-8B, beside XLA's fusions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.formats import QuantizedRows, RowFormat
from pallas_kernels.quantize_rows import norm_and_quantize_rows, quantize_rows
from pallas_kernels.target import H200
from scripts.kernels.common import Case, Program

EMBED, MLP, EPS = 4096, 14336, 1e-5
ROUNDED: dict[RowFormat, float] = {"int8": 0.016, "fp8": 0.035}
"""The largest error of a row that its steps explain."""


def cases() -> list[Case]:
    sizes = ((EMBED, True), (EMBED, False), (MLP, False))
    some = [case("int8", rows, width, norm) for width, norm in sizes for rows in (1, 64, 256, 2048)]
    return [*some, case("fp8", 64, EMBED, True), case("fp8", 64, MLP, False)]


def case(format: RowFormat, rows: int, width: int, norm: bool) -> Case:
    def program(implementation: choice.Implementation) -> Program:
        fn = functools.partial(normed if norm else alone, format=format, implementation=implementation)
        return Program(fn, result=read)

    return Case(
        name=f"{format}{' norm' if norm else ''} {rows}x{width}",
        op="quantize_rows",
        inputs=functools.partial(inputs, rows=rows, width=width, norm=norm),
        programs={"mosaic": program("mosaic"), "xla": program("xla")},
        reference=reference,
        tolerance=ROUNDED[format],
        bytes=rows * width * (7 if norm else 3),
        flops=rows * width * (8 if norm else 3),
    )


def inputs(key: jax.Array, *, rows: int, width: int, norm: bool) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 3)
    x, delta = (jax.random.normal(each, (rows, width), jnp.bfloat16) for each in keys[:2])
    return (x, delta, 1 + 0.2 * jax.random.normal(keys[2], (width,), jnp.bfloat16)) if norm else (x,)


def alone(x: jax.Array, *, format: RowFormat, implementation: choice.Implementation) -> tuple[QuantizedRows]:
    return (quantize_rows(x, format, target=H200, implementation=implementation),)


def normed(
    x: jax.Array, delta: jax.Array, scale: jax.Array, *, format: RowFormat, implementation: choice.Implementation
) -> tuple[jax.Array, QuantizedRows]:
    return norm_and_quantize_rows(x, delta, scale, eps=EPS, format=format, target=H200, implementation=implementation)


def read(out: tuple[jax.Array | QuantizedRows, ...]) -> tuple[jax.Array, ...]:
    """What the reference returns."""
    wide = (x.values.astype(jnp.float32) * x.scales[:, None] if isinstance(x, QuantizedRows) else x for x in out)
    return tuple(wide)


def reference(x: jax.Array, delta: jax.Array | None = None, scale: jax.Array | None = None) -> tuple[jax.Array, ...]:
    if delta is None or scale is None:
        return (x.astype(jnp.float32),)
    wide, factor = (x + delta).astype(jnp.float32), scale.astype(jnp.float32)
    return wide, wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS) * factor
