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

THREADS = plgpu.Layout.TILED(plgpu.Tiling(((STEP,), (STEP // 4,), (8,))), (-3,), (-2,), -1)


def rms_norm(
    x: jax.Array, delta: jax.Array | None, scale: jax.Array, *, eps: float, interpret: Any = None
) -> list[jax.Array]:
    """x, delta: [rows, embed] of 16 bits, embed a multiple of STEP; scale: [embed].

    Returns [normalised x], or with a delta [x + delta, normalised x + delta].
    """
    rows = x.shape[0]

    def kernel(scale_ref: Any, *refs: Any) -> None:
        sources, outs = refs[: len(rest)], refs[len(rest) :]
        row = lax.axis_index("row")
        total = load_sum(*(source.at[row] for source in sources))
        if delta is not None:
            outs[0].at[row][...] = total
        wide = total.astype(jnp.float32)
        outs[-1].at[row][...] = (wide * factor(wide, eps) * load(scale_ref).astype(jnp.float32)).astype(x.dtype)

    rest = [x] if delta is None else [x, delta]
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * len(rest),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="rms_norm" if delta is None else "add_rms_norm",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # each thread writes what it has read
        **interpreted(interpret),
    )(scale, *rest)


def load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=THREADS, optimized=False)


def load_sum(x: Any, delta: Any = None) -> jax.Array:
    """A row of x, or the sum of two, rounded. x, delta: [embed] each, in memory."""
    row = load(x)
    return row if delta is None else (row.astype(jnp.float32) + load(delta).astype(jnp.float32)).astype(row.dtype)


def factor(wide: jax.Array, eps: float) -> jax.Array:
    """1 / rms of a row, [embed] f32."""
    return lax.rsqrt((wide * wide).sum() * (1.0 / wide.shape[0]) + eps)
