"""quant_matmul in plain JAX. The whole weight in full precision never exists, except int4's on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedArray, QuantizedRows, dequantize

OUTPUTS_AT_ONCE = 256
"""Rows of the weight that a CPU widens together: a few megabytes, which stay in its cache."""
OVER_INPUTS = (((1,), (1,)), ((), ()))


def quant_matmul(x: jax.Array, weight: QuantizedArray, out_dtype: Any = None, *, platform: str = "cpu") -> jax.Array:
    """x: [rows, inputs]; weight: of [outputs, inputs]. Returns [rows, outputs] in out_dtype; sums are float32.

    On a CPU all of it is float32, whatever x is. out_dtype: x's by default.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if platform != "cpu":
        return _by_dot(x, weight, out_dtype)
    wide = x.astype(jnp.float32)
    if weight.format == "int8":
        # Written as a sum of products: XLA widens the weight within its matmul then, and for a dot in memory.
        out = jnp.sum(wide[:, None, :] * weight.values.astype(jnp.float32), axis=-1) * weight.scales
    else:
        # As bits, or XLA widens all of an fp8 weight before the loop.
        bits = jax.lax.bitcast_convert_type(weight.values, jnp.uint8)

        def dot(row: QuantizedArray) -> jax.Array:
            values = jax.lax.bitcast_convert_type(row.values, weight.values.dtype)
            return _dot(wide, dequantize(dataclasses.replace(row, values=values), jnp.float32))

        out = jax.lax.map(dot, dataclasses.replace(weight, values=bits), batch_size=OUTPUTS_AT_ONCE).T
    return out.astype(out_dtype)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x: [rows, inputs]; y: [inputs], f32. float32 stays float32 on hardware that would rather round it to TF32."""
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def _by_dot(x: jax.Array, weight: QuantizedArray, out_dtype: Any) -> jax.Array:
    """A scale per output comes after the sum, and XLA's matmul widens values as it reads them."""
    per_group = weight.group_size is not None
    wide = dequantize(weight, x.dtype) if per_group else weight.values.astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jax.lax.dot_general(x, wide, OVER_INPUTS, precision=precision, preferred_element_type=jnp.float32)
    return (out if per_group else out * weight.scales).astype(out_dtype)


def quant_matmul_8bit(x: QuantizedRows, weight: QuantizedArray, out_dtype: Any) -> jax.Array:
    """The same on 8-bit matrix units; x: [rows, inputs] in the weight's format, int8 or fp8."""
    total = jnp.int32 if weight.format == "int8" else jnp.float32
    out = jax.lax.dot_general(x.values, weight.values, OVER_INPUTS, preferred_element_type=total)
    return (out.astype(jnp.float32) * x.scales[:, None] * weight.scales).astype(out_dtype)
