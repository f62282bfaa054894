"""quant_matmul at the sizes of Llama-3-8B, beside XLA on the same weights and cuBLAS on bfloat16."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.formats import Format, QuantizedArray, dequantize, quantize
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.target import H200
from scripts.kernels.common import Case, Program

GATE_UP, DOWN, QKV, OUT, HEAD = (4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096), (4096, 128256)
ROUNDED: dict[Format, float] = {"int8": 2e-2, "fp8": 6e-2}
"""What rounding x to 8 bits changes at most of a row of the product, relative."""
PIECE = 1024
"""Outputs whose weights are made at once: quantizing takes float32."""


def make_inputs(
    key: jax.Array, rows: int, inputs: int, outputs: int | tuple[int, ...], format: Format, symmetric: bool
) -> tuple[jax.Array, QuantizedArray]:
    shape = outputs if isinstance(outputs, tuple) else (outputs,)
    total = math.prod(shape)
    first, *keys = jax.random.split(key, total // PIECE + 2)

    def piece(key: jax.Array) -> QuantizedArray:
        weight = jax.random.normal(key, (inputs, min(PIECE, total)), jnp.bfloat16) * inputs**-0.5
        return quantize(weight, format, symmetric=symmetric)

    pieces = jax.lax.map(piece, jnp.stack(keys))
    weight = jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:total].reshape(*shape, *leaf.shape[2:]), pieces
    )
    return jax.random.normal(first, (rows, inputs), jnp.bfloat16), weight


def reference(x: jax.Array, weight: QuantizedArray) -> jax.Array:
    wide = dequantize(weight, jnp.float32)
    return jax.lax.dot_general(x.astype(jnp.float32), wide, (((1,), (1,)), ((), ())), precision="highest")


def widened(x: jax.Array, weight: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """For cuBLAS, laid out as it likes best."""
    return x, dequantize(weight, jnp.bfloat16).T


def eight_bits(x: jax.Array, weight: QuantizedArray, implementation: choice.Implementation = None) -> jax.Array:
    """With x rounded to the weight's format first, as `implementation` does both."""
    options: dict[str, Any] = {"target": H200, "implementation": implementation}
    return quant_matmul(quantize_rows(x, weight.format, **options), weight, **options)  # type: ignore[arg-type]


def case(
    format: Format,
    rows: int,
    shape: tuple[int, int],
    *,
    symmetric: bool = True,
    activations: bool = False,
    **targets: Any,
) -> Case:
    """activations: whether x is rounded to the weight's format, too; its time is part of what is measured."""
    inputs, outputs = shape
    make = functools.partial(make_inputs, rows=rows, inputs=inputs, outputs=outputs, format=format, symmetric=symmetric)
    _, weight = jax.eval_shape(make, jax.random.key(0))
    name = format + ("" if symmetric else " zeros") + (" activations" if activations else "")
    run = eight_bits if activations else functools.partial(quant_matmul, target=H200)
    programs = {"mosaic": Program(functools.partial(run, implementation="mosaic"))}
    programs["xla"] = Program(functools.partial(run, implementation="xla"), autotuned=True)
    programs["bf16"] = Program(jnp.matmul, prepare=widened, autotuned=True)
    return Case(
        name=f"{name} {inputs}x{outputs} M={rows}",
        op="quant_matmul",
        inputs=make,
        programs=programs,
        reference=reference,
        tolerance=ROUNDED[format] if activations else 4e-3,
        bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)) + 2 * rows * (inputs + outputs),
        flops=2 * rows * inputs * outputs,
        **targets,
    )


def cases() -> list[Case]:
    small = [case("int8", rows, GATE_UP, min_share=share) for rows, share in ((1, 0.80), (16, 0.78), (64, 0.65))]
    small += [case("fp8", rows, GATE_UP, min_share=share) for rows, share in ((1, 0.80), (16, 0.78), (64, 0.65))]
    small += [
        case("int4", rows, GATE_UP, max_ratio=("bf16", ratio)) for rows, ratio in ((1, 0.42), (16, 0.45), (64, 0.60))
    ]
    small += [case("int4", 16, GATE_UP, symmetric=False)]
    small += [case(format, 1, shape) for format in ("int8", "int4") for shape in (QKV, OUT, DOWN, HEAD)]
    small += [case("int8", 64, shape) for shape in (QKV, OUT, DOWN)]
    large = [case("int8", rows, shape) for rows in (128, 256) for shape in (QKV, OUT, DOWN)]
    large += [case("int8", 128, GATE_UP)]
    large += [case(format, rows, GATE_UP) for rows in (256, 2048) for format in ("int8", "int4")]
    eight = [
        case(format, rows, GATE_UP, activations=True) for format in ROUNDED for rows in (1, 16, 64, 128, 256, 2048)
    ]
    eight += [case(format, rows, DOWN, activations=True) for format in ROUNDED for rows in (1, 64, 256)]
    eight += [case(format, rows, QKV, activations=True) for format in ROUNDED for rows in (64, 256)]
    return small + large + eight
