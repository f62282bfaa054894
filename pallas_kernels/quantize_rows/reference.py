"""What quantize_rows means: numpy, float32, one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def quantize_rows(x: Array, dtype: Any) -> tuple[NDArray[Any], Array]:
    """x: [rows, inputs]; dtype: int8 or float8_e4m3fn. Returns values of dtype, [rows, inputs], and scales [rows]."""
    values, scales = np.zeros(x.shape, dtype), np.zeros(len(x), np.float32)
    for i, row in enumerate(x):
        largest = np.abs(row).max(initial=0.0)
        scales[i] = largest / (127 if dtype == np.int8 else 448)
        if largest:
            stored = row / scales[i]
            values[i] = (np.rint(stored) if dtype == np.int8 else stored).astype(dtype)
    return values, scales
