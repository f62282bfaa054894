"""Numbers as sums of two 8-bit ones, which the matrix unit multiplies by an 8-bit cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

F32, I32 = jnp.float32, jnp.int32


class Terms:
    """A number as two of an 8-bit dtype: x = (high + low / step) / unit for |x| <= 1."""

    def __init__(self, dtype: Any):
        self.dtype = jnp.dtype(dtype)
        self.integer = self.dtype == jnp.int8
        self.unit, self.step = (127.0, 128.0) if self.integer else (256.0, 16.0)
        self.sum = I32 if self.integer else F32

    def split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two terms, still in float32. x: in units, |x| <= unit."""
        if self.integer:
            high = jnp.round(x)
            return high, jnp.round((x - high) * self.step)
        # Round to the 4 significant bits of e4m3 as integers: compilers simplify what does it in floating point.
        bits = lax.bitcast_convert_type(x, I32)
        high = lax.bitcast_convert_type((bits + 0x80000) & ~0xFFFFF, F32)
        return high, (x - high) * self.step

    def store(self, ref: Any, x: jax.Array) -> None:
        """Write [rows, columns] in WGMMA layout, transposed, as 8 bits."""
        x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        ref.transpose((1, 0))[...] = (x.astype(I32) if self.integer else x).astype(self.dtype)

    def join(self, high: jax.Array, low: jax.Array) -> jax.Array:
        return high.astype(F32) + low.astype(F32) * (1 / self.step)
