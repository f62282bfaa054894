"""Weights in 8 and 4 bits: how they are stored, made, and read back."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

type Format = Literal["int8", "fp8", "int4", "mxfp4"]
type RowFormat = Literal["int8", "fp8"]
"""Of activations."""
ROW_DTYPES: dict[RowFormat, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST: dict[RowFormat, float] = {"int8": 127.0, "fp8": 448.0}
"""What the largest of a row, or of an output's weights, is stored as."""
FORMATS: tuple[Format, ...] = ("int8", "fp8", "int4")
"""Those that every operation takes. mxfp4 is for experts, which some checkpoints have so (gpt-oss)."""
GROUP_SIZES = (32, 64, 128)
"""Inputs that share a scale in int4."""
MXFP4_GROUP = 32
"""Inputs that share a scale in mxfp4 (OCP Microscaling 1.0)."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros"],
    meta_fields=["format", "group_size", "round_activations"],
)
@dataclass(frozen=True)
class QuantizedArray:
    """A weight [inputs, *outputs] stored as [*outputs, inputs]: weight = scale x (value - zero).

    A leading [experts] may come before. The inputs lie innermost because matrix units read 8 bits only so.
    """

    values: jax.Array
    """int8: [*outputs, inputs] int8; fp8: the same, float8_e4m3fn; int4: [*outputs, inputs / 2] uint8 (`pack_int4`);
    mxfp4: the same, of codes 0..15 less 8: sign, 2 bits of exponent, 1 of mantissa (E2M1)."""
    scales: jax.Array
    """[*outputs] f32; int4: [*outputs, inputs / group_size] in the activations' dtype; mxfp4: the same, uint8, the
    exponent of 2 plus 127 (E8M0); 255 is NaN, and 0, below what float32 arithmetic keeps, is zero."""
    zeros: jax.Array | None
    """int4 with zero points: like `scales`, the value in -8..7 that stands for 0, whole; None: symmetric."""
    format: Format
    group_size: int | None = None
    """int4 and mxfp4 only: inputs that share a scale."""
    round_activations: bool = False
    """int8 and fp8 only: whether what is multiplied by it is rounded to its format, too."""

    @property
    def inputs(self) -> int:
        return self.values.shape[-1] * (1 if self.group_size is None else 2)

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
    `symmetric`, a zero point; mxfp4 a power of two for 32. Raises ValueError for an unknown format and for groups that
    do not divide the inputs.
    """
    if format not in (*FORMATS, "mxfp4"):
        raise ValueError(f"there is no weight format {format!r}; there are: {', '.join(FORMATS)}")
    lead, inputs = weight.shape[:batch], math.prod(weight.shape[batch : batch + contract])
    outputs = weight.shape[batch + contract :]
    flat = weight.reshape(*lead, inputs, *outputs)
    wide = jnp.moveaxis(flat, batch, -1).astype(jnp.float32)
    if format == "int4":
        return _quantize_int4(wide, group_size, symmetric, weight.dtype)
    if format == "mxfp4":
        return _quantize_mxfp4(wide)
    stored = round_rows(wide, format, weight.dtype)
    return QuantizedArray(stored.values, stored.scales, None, format)


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


def _quantize_mxfp4(wide: jax.Array) -> QuantizedArray:
    """The scale makes a group's largest 4 to below 8, as the standard says; beyond 6 it saturates."""
    if wide.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"groups of {MXFP4_GROUP} do not divide {wide.shape[-1]} inputs; use int8")
    groups = wide.reshape(*wide.shape[:-1], -1, MXFP4_GROUP)
    _, exponents = jnp.frexp(jnp.max(jnp.abs(groups), axis=-1))  # of the largest in 0.5..1
    exponents = jnp.clip(exponents - 3, -126, 127)
    scaled = jnp.ldexp(groups, -exponents[..., None])
    # Between two neighbours the even code, whose mantissa is 0, takes the middle.
    codes = sum(
        (jnp.abs(scaled) > middle) | ((jnp.abs(scaled) == middle) & (code % 2 == 0))
        for code, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), start=1)
    )
    codes = jnp.where(scaled < 0, codes + 8, codes).astype(jnp.int8)
    scales = (exponents + 127).astype(jnp.uint8)
    return QuantizedArray(pack_int4(codes.reshape(wide.shape) - 8), scales, None, "mxfp4", MXFP4_GROUP)


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
    if weight.group_size is None:
        return (weight.values.astype(jnp.float32) * weight.scales[..., None]).astype(dtype)
    values, scales = unpack_int4(weight.values), weight.scales
    if weight.format == "mxfp4":
        wide, scales = e2m1(values + jnp.int8(8)), e8m0(scales)
    else:
        wide = values.astype(jnp.float32)
    groups = wide.reshape(*values.shape[:-1], -1, weight.group_size)
    if weight.zeros is not None:
        groups = groups - weight.zeros.astype(jnp.float32)[..., None]
    return (groups * scales.astype(jnp.float32)[..., None]).reshape(values.shape).astype(dtype)


def e2m1(codes: jax.Array) -> jax.Array:
    """float32 of codes 0..15 int8: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    twice = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    twice = jnp.where(codes > 7, -twice, twice)
    # Or XLA would put each step of this in the packed order, and transpose them all.
    return 0.5 * jax.lax.optimization_barrier(twice).astype(jnp.float32)


def e8m0(exponents: jax.Array) -> jax.Array:
    """float32 of uint8."""
    powers = jax.lax.bitcast_convert_type(exponents.astype(jnp.int32) << 23, jnp.float32)
    return jnp.where(exponents == 255, jnp.nan, powers)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["dtype"])
@dataclass(frozen=True)
class QuantizedRows:
    """Activations in 8 bits: x = scale x value, about."""

    values: jax.Array
    """[rows, inputs] int8 or float8_e4m3fn."""
    scales: jax.Array
    """[rows] f32."""
    dtype: Any
    """What they were made of, and what products with them are made in."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def format(self) -> RowFormat:
        return "int8" if self.values.dtype == jnp.int8 else "fp8"


def round_rows(wide: jax.Array, format: RowFormat, dtype: Any) -> QuantizedRows:
    """wide: [rows, inputs] f32; dtype: that of the activations."""
    scales = jnp.max(jnp.abs(wide), axis=-1, initial=0.0) / LARGEST[format]
    stored = wide / jnp.where(scales == 0.0, 1.0, scales)[..., None]
    values = (jnp.round(stored) if format == "int8" else stored).astype(ROW_DTYPES[format])
    return QuantizedRows(values, scales, jnp.dtype(dtype))
