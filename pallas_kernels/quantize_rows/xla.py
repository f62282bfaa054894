"""quantize_rows in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedRows, RowFormat, round_rows


def quantize_rows(x: jax.Array, format: RowFormat) -> QuantizedRows:
    """x: [rows, inputs]."""
    return round_rows(x.astype(jnp.float32), format, x.dtype)


def norm_and_quantize_rows(
    x: jax.Array, delta: jax.Array | None, scale: jax.Array, *, eps: float, format: RowFormat
) -> tuple[jax.Array, QuantizedRows]:
    """x, delta: [rows, embed]; scale: [embed]."""
    x = x if delta is None else x + delta
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return x, round_rows(wide * scale.astype(jnp.float32), format, x.dtype)
