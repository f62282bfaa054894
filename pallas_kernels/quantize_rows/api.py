"""Checks the arguments of quantize_rows and picks the implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.formats import ROW_DTYPES, QuantizedRows, RowFormat
from pallas_kernels.quantize_rows import kernel, xla
from pallas_kernels.target import CPU, Target

MOST_INPUTS = 16384
"""128 elements a thread: a row has to fit in registers."""


def quantize_rows(
    x: jax.Array,
    format: RowFormat,
    *,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> QuantizedRows:
    """x in 8 bits, for `quant_matmul` with a weight in 8 bits, too: each row over a scale of its own, rounded.

    x: [rows, inputs] float; format: "int8" (the row's largest becomes 127) or "fp8" (float8_e4m3fn; 448).
    Raises ValueError for another format.
    """
    _check(x, format)
    if choice.resolve("quantize_rows", implementation, obstacle(x, target)) == "xla":
        return xla.quantize_rows(x, format)
    return kernel.quantize_rows(x, format, interpret=interpret)[1]


def norm_and_quantize_rows(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    format: RowFormat,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> tuple[jax.Array, QuantizedRows]:
    """(x + delta, `quantize_rows` of its `rms_norm`), the norm not rounded in between; without delta, of x.

    x, delta: [rows, embed] of one dtype; scale: [embed]. Raises ValueError if shapes or dtypes disagree.
    """
    _check(x, format)
    choice.check_shape("scale", scale, (x.shape[1],))
    if delta is not None:
        choice.check_shape("delta", delta, x.shape)
        if x.dtype != delta.dtype:
            raise ValueError(f"x is {x.dtype} and delta {delta.dtype}; norm_and_quantize_rows takes one dtype")
    if choice.resolve("quantize_rows", implementation, obstacle(x, target)) == "xla":
        return xla.norm_and_quantize_rows(x, delta, scale, eps=eps, format=format)
    return kernel.quantize_rows(x, format, delta, scale, eps=eps, interpret=interpret)


def obstacle(x: jax.Array, target: Target) -> str | None:
    """Why the kernel cannot run; None if it can."""
    (rows, inputs), dtype = x.shape, jnp.dtype(x.dtype)
    if reason := target.lacks_mosaic():
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {dtype.name}; it takes bfloat16 or float16"
    if kernel.together(inputs) is None or inputs > MOST_INPUTS:
        return f"a row has {inputs} elements; it takes multiples of {2 * kernel.THREADS} up to {MOST_INPUTS}"
    return None if rows else "there are no rows"


def _check(x: jax.Array, format: str) -> None:
    choice.check_shape("x", x, (None, None))
    if format not in ROW_DTYPES:
        raise ValueError(f"format is {format!r}; rows are quantized to {' or '.join(ROW_DTYPES)}")
