"""Weights in 8 and 4 bits: how they are stored, made, and read back."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

type Format = Literal["int8", "fp8", "int4"]
FORMATS: tuple[Format, ...] = ("int8", "fp8", "int4")
GROUP_SIZES = (32, 64, 128)
"""Inputs that share a scale in int4."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scales", "zeros"], meta_fields=["format", "group_size"]
)
@dataclass(frozen=True)
class QuantizedArray:
    """A weight [inputs, *outputs] stored as [*outputs, inputs]: weight = scale x (value - zero).

    A leading [experts] may come before. The inputs lie innermost because matrix units read 8 bits only so.
    """

    values: jax.Array
    """int8: [*outputs, inputs] int8; fp8: the same, float8_e4m3fn; int4: [*outputs, inputs / 2] uint8 (`pack_int4`)."""
    scales: jax.Array
    """[*outputs] f32; int4: [*outputs, inputs / group_size] in the activations' dtype."""
    zeros: jax.Array | None
    """int4 with zero points: like `scales`, the value in -8..7 that stands for 0, whole; None: symmetric."""
    format: Format
    group_size: int | None = None
    """int4 only."""

    @property
    def inputs(self) -> int:
        return self.values.shape[-1] * (2 if self.format == "int4" else 1)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Every dimension before the inputs, [experts] included."""
        return self.values.shape[:-1]


def quantize(
    weight: jax.Array,
    format: Format,
    *,
    contract: int = 1,
    batch: int = 0,
    group_size: int = 128,
    symmetric: bool = True,
) -> QuantizedArray:
    """weight: [*batch, *inputs, *outputs], `contract` dimensions of inputs, which become one.

    Rounds to nearest. int8 and fp8 have a scale per output; int4 one per output and `group_size` inputs, and, unless
    `symmetric`, a zero point. Raises ValueError for an unknown format and for groups that do not divide the inputs.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no weight format {format!r}; there are: {', '.join(FORMATS)}")
    lead, inputs = weight.shape[:batch], math.prod(weight.shape[batch : batch + contract])
    outputs = weight.shape[batch + contract :]
    flat = weight.reshape(*lead, inputs, *outputs)
    wide = jnp.moveaxis(flat, batch, -1).astype(jnp.float32)
    if format == "int4":
        return _quantize_int4(wide, group_size, symmetric, weight.dtype)
    dtype, largest = (jnp.int8, 127.0) if format == "int8" else (jnp.float8_e4m3fn, 448.0)
    scales = jnp.max(jnp.abs(wide), axis=-1) / largest
    stored = wide / jnp.where(scales == 0.0, 1.0, scales)[..., None]
    return QuantizedArray((jnp.round(stored) if format == "int8" else stored).astype(dtype), scales, None, format)


def _quantize_int4(wide: jax.Array, group_size: int, symmetric: bool, dtype: Any) -> QuantizedArray:
    inputs = wide.shape[-1]
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}; int4 weights take one of {', '.join(map(str, GROUP_SIZES))}")
    if inputs % group_size:
        raise ValueError(f"groups of {group_size} do not divide {inputs} inputs; take a smaller group_size, or int8")
    groups = wide.reshape(*wide.shape[:-1], inputs // group_size, group_size)
    if symmetric:
        scales, zeros = jnp.max(jnp.abs(groups), axis=-1) / 7.0, None
    else:
        low, high = jnp.minimum(groups.min(-1), 0.0), jnp.maximum(groups.max(-1), 0.0)
        scales = (high - low) / 15.0
    # Values are made for the scales as stored, rounded to the activations' dtype.
    scales = jnp.where(scales == 0.0, 1.0, scales).astype(dtype)
    wide_scales = scales.astype(jnp.float32)[..., None]
    if not symmetric:
        zeros = jnp.clip(jnp.round(-8.0 - low / wide_scales[..., 0]), -8, 7).astype(dtype)
        groups = groups + zeros.astype(jnp.float32)[..., None] * wide_scales
    values = jnp.clip(jnp.round(groups / wide_scales), -8, 7).astype(jnp.int8)
    return QuantizedArray(pack_int4(values.reshape(wide.shape)), scales, zeros, "int4", group_size)


def pack_int4(values: jax.Array) -> jax.Array:
    """[..., inputs] int8 in -8..7 to [..., inputs / 2] uint8; inputs: a multiple of 32.

    Each value is stored plus 8. 32 inputs are 4 words of 4 bytes, one for each thread that holds these inputs of an
    output when a matrix unit reads them. Input 16 s + 8 h + 2 c + e (s, h, e: 0 or 1) is in word c, bits
    16 e + 8 s + 4 h and the 3 above: one mask leaves a pair of neighbours (e), ready to become a pair of 16-bit floats.
    """
    lead = values.shape[:-1]
    fields = (values + 8).astype(jnp.uint8).reshape(*lead, -1, 2, 2, 4, 2)  # s, h, c, e
    fields = jnp.moveaxis(fields, (-2, -1, -4, -3), (-4, -3, -2, -1))
    return (fields[..., 0] | (fields[..., 1] << 4)).reshape(*lead, -1)


def unpack_int4(packed: jax.Array) -> jax.Array:
    """The inverse of `pack_int4`."""
    fields = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.int8) - 8
    fields = fields.reshape(*packed.shape[:-1], -1, 4, 2, 2, 2)  # c, e, s, h
    fields = jnp.moveaxis(fields, (-2, -1, -4, -3), (-4, -3, -2, -1))
    return fields.reshape(*packed.shape[:-1], -1)


def dequantize(weight: QuantizedArray, dtype: Any) -> jax.Array:
    """[*outputs, inputs] in `dtype`: as stored, not transposed back."""
    if weight.format != "int4":
        return (weight.values.astype(jnp.float32) * weight.scales[..., None]).astype(dtype)
    values = unpack_int4(weight.values).astype(jnp.float32)
    groups = values.reshape(*values.shape[:-1], -1, weight.group_size)
    if weight.zeros is not None:
        groups = groups - weight.zeros.astype(jnp.float32)[..., None]
    return (groups * weight.scales.astype(jnp.float32)[..., None]).reshape(values.shape).astype(dtype)


def quantize_rows(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Activations in 8 bits: x = scale x stored, about, a scale per row. x: [rows, inputs]; dtype: int8 or fp8's.

    Returns ([rows, inputs] of dtype, [rows] f32).
    """
    largest = 127.0 if dtype == jnp.int8 else 448.0
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1, initial=0.0) / largest
    stored = wide / jnp.where(scales == 0.0, 1.0, scales)[..., None]
    return (jnp.round(stored) if dtype == jnp.int8 else stored).astype(dtype), scales
