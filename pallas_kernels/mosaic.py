"""What Mosaic GPU kernels share: shared-memory layouts, and running a kernel in the interpreter."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(dtype: Any, columns: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Transforms of a [rows, columns] tile in shared memory that the copy engine and the matrix unit both read."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def interpreted(interpret: Any) -> dict[str, Any]:
    """Keyword arguments of `plgpu.kernel`: None compiles it; an InterpretGPUParams runs it on any machine."""
    return {} if interpret is None else {"interpret": interpret}
