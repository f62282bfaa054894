"""rms_norm as one Mosaic GPU kernel: a block of 128 threads holds one row in registers, between one read and one write.

XLA takes two kernels for a single row, and one that reads the row twice for several.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import interpreted

STEP = 1024
"""Elements that 128 threads take together, 8 each: 16 bytes of 16-bit numbers, the widest copy there is."""


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float, interpret: Any = None) -> jax.Array:
    """x: [rows, embed] of 16 bits, embed a multiple of STEP; scale: [embed]."""
    rows, embed = x.shape
    threads = plgpu.Layout.TILED(plgpu.Tiling(((STEP,), (STEP // 4,), (8,))), (-3,), (-2,), -1)

    def normalise(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        row = lax.axis_index("row")
        wide = plgpu.load(x_ref.at[row], layout=threads, optimized=False).astype(jnp.float32)
        factors = plgpu.load(scale_ref, layout=threads, optimized=False).astype(jnp.float32)
        inverse = lax.rsqrt((wide * wide).sum() * (1.0 / embed) + eps)
        out_ref.at[row][...] = (wide * inverse * factors).astype(x.dtype)

    return plgpu.kernel(
        normalise,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # each thread writes what it has read
        **interpreted(interpret),
    )(x, scale)
