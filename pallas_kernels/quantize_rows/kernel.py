"""quantize_rows as one Mosaic GPU kernel: a block of 128 threads holds a row, or its norm, in registers.

So it is read once, and written in 8 bits once. The kernel of `rms_norm`, with another end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import LARGEST, ROW_DTYPES, QuantizedRows, RowFormat
from pallas_kernels.mosaic import interpreted

F32 = jnp.float32
THREADS = 128
SMALLEST = 1e-30
"""So small a scale has no inverse, and what it scales is stored as 0."""


def together(inputs: int) -> int | None:
    """Neighbours that a thread takes: as many as 16 bytes have if the row allows it. None: none fit."""
    return next((n for n in (8, 4, 2) if inputs % (THREADS * n) == 0), None)


def quantize_rows(
    x: jax.Array,
    format: RowFormat,
    delta: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    eps: float = 0.0,
    interpret: Any = None,
) -> tuple[jax.Array, QuantizedRows]:
    """x, delta: [rows, inputs] of 16 bits, inputs as `together` says; scale: [inputs], of a norm; None: no norm.

    Returns x + delta, and (the norm of) that in 8 bits.
    """
    rows, inputs = x.shape
    each, stored = together(inputs), ROW_DTYPES[format]
    assert each is not None
    step = THREADS * each
    threads = plgpu.Layout.TILED(plgpu.Tiling(((step,), (step // 4,), (each,))), (-3,), (-2,), -1)
    given = {name: array for name, array in (("x", x), ("delta", delta), ("scale", scale)) if array is not None}
    made = {"values": jax.ShapeDtypeStruct(x.shape, stored), "scales": jax.ShapeDtypeStruct((rows,), F32)}
    if delta is not None:
        made["total"] = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=threads, optimized=False).astype(F32)

    def kernel(*refs: Any) -> None:
        ref, row = dict(zip((*given, *made), refs, strict=True)), lax.axis_index("row")
        wide = load(ref["x"].at[row])
        if delta is not None:
            total = (wide + load(ref["delta"].at[row])).astype(x.dtype)
            ref["total"].at[row][...] = total
            wide = total.astype(F32)
        if scale is not None:
            wide = wide * lax.rsqrt((wide * wide).sum() * (1.0 / inputs) + eps) * load(ref["scale"])
        row_scale = jnp.abs(wide).max() * (1.0 / LARGEST[format])
        ref["scales"][row] = row_scale
        wide = wide * (1.0 / jnp.where(row_scale < SMALLEST, 1.0, row_scale))
        ref["values"].at[row][...] = (jnp.round(wide).astype(jnp.int32) if format == "int8" else wide).astype(stored)

    out = plgpu.kernel(
        kernel,
        out_type=tuple(made.values()),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="quantize_rows" if scale is None else "norm_and_quantize_rows",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # each thread writes what it has read
        **interpreted(interpret),
    )(*given.values())
    values, scales, *total = out
    return total[0] if total else x, QuantizedRows(values, scales, x.dtype)
