"""Checks the arguments of quant_matmul and picks the implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.formats import ROW_DTYPES, QuantizedArray, QuantizedRows
from pallas_kernels.quant_matmul import config, kernel, xla
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.target import CPU, Target

DTYPES = ("bfloat16", "float16", "float32")


def quant_matmul(
    x: jax.Array | QuantizedRows,
    weight: QuantizedArray,
    *,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    out_dtype: Any = None,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """x times the weight that `weight` stands for, summed in float32.

    x: [rows, inputs] bf16, f16 or f32; weight: of [inputs, *outputs], int8, fp8 or int4. Returns [rows, *outputs] in
    out_dtype, by default x's; float32 is the sum as it is, for logits. Where x is QuantizedRows, or the weight says
    `round_activations`, both are multiplied in 8 bits, x with a scale for each row: faster with many rows, and further
    off, by about 1 % (int8) or 4 % (fp8) of a random product's size. Sums of int8 are exact, those of fp8 of as many
    bits as matrix units keep over 256 inputs. combine: of a weight of [inputs, 2, n], what to make of the products
    with both halves, each [rows, n] f32, in operations that Mosaic GPU has; returns [rows, n] then. The kernel does so
    before it stores.
    implementation: None is the kernel where it was measured to be faster (`scripts/bench_kernels.py --only quant`).
    interpret: an InterpretGPUParams runs the kernel on any machine.
    Raises ValueError for shapes and dtypes that do not fit, and for rows in another format than the weight.
    """
    if x.dtype.name not in DTYPES:
        raise ValueError(f"x is {x.dtype}; quant_matmul takes {', '.join(DTYPES)}")
    choice.check_shape("x", x, (None, weight.inputs))
    options: dict[str, Any] = {"target": target, "implementation": implementation, "interpret": interpret}
    if weight.round_activations and not isinstance(x, QuantizedRows):
        if weight.format not in ROW_DTYPES:
            raise ValueError(f"the weight is {weight.format}; only those in int8 and fp8 have activations rounded")
        x = quantize_rows(x, weight.format, **options)
    if isinstance(x, QuantizedRows) and x.format != weight.format:
        raise ValueError(
            f"x is {x.format} and the weight {weight.format}; 8-bit matrix units take both in one format: quantize the "
            "weight so, or leave x as it is"
        )
    if combine is not None and (len(weight.outputs) != 2 or weight.outputs[0] != 2):
        raise ValueError(f"combine takes a weight of outputs [2, n], and this one's are {list(weight.outputs)}")
    flat, narrow = flattened(weight), isinstance(x, QuantizedRows)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    parts = 1 if combine is None else 2
    cut = config.choose(x.shape[0], flat, out_dtype.itemsize, target, parts, narrow)
    obstacle = obstacle_of(x, flat, target, cut)
    loses = None if cut is None else config.loses(x.shape[0], flat, cut, target, parts, narrow)
    if choice.resolve("quant_matmul", implementation, obstacle, loses) == "mosaic":
        assert cut is not None
        out = kernel.quant_matmul(x, flat, out_dtype, cut, combine, interpret=interpret)
        return out.reshape(x.shape[0], *weight.outputs[parts - 1 :])
    product_dtype = out_dtype if combine is None else x.dtype
    if isinstance(x, QuantizedRows):
        out = xla.quant_matmul_8bit(x, flat, product_dtype)
    else:
        out = xla.quant_matmul(x, flat, product_dtype, platform=target.platform)
    out = out.reshape(x.shape[0], *weight.outputs)
    if combine is None:
        return out
    wide = out.astype(jnp.float32)
    return combine(wide[:, 0], wide[:, 1]).astype(out_dtype)


def flattened(weight: QuantizedArray) -> QuantizedArray:
    """The same weight with its outputs in one dimension."""
    inner = 0 if weight.group_size is None else 1

    def rows(array: jax.Array, inner: int) -> jax.Array:
        return array.reshape(-1, *array.shape[array.ndim - inner :])

    return dataclasses.replace(
        weight,
        values=rows(weight.values, 1),
        scales=rows(weight.scales, inner),
        zeros=None if weight.zeros is None else rows(weight.zeros, inner),
    )


def obstacle_of(
    x: jax.Array | QuantizedRows, weight: QuantizedArray, target: Target, cut: config.Config | None
) -> str | None:
    """Why the kernel cannot run here; None if it can."""
    if (lack := target.lacks_hopper()) is not None:
        return lack
    if x.dtype == jnp.float32 and not isinstance(x, QuantizedRows):
        return "it multiplies bfloat16 and float16, and x is float32"
    if weight.format == "int4" and weight.scales.dtype != x.dtype:
        return f"it takes int4 scales in x's dtype, {x.dtype}, and these are {weight.scales.dtype}"
    if weight.format == "mxfp4":
        return "it widens int8, fp8 and int4, and not mxfp4"
    if x.shape[0] == 0:
        return "x has no rows"
    if cut is None:
        return f"it cannot be cut for {weight.inputs} inputs and {weight.outputs[0]} outputs of {weight.format}"
    return None
