"""What rms_norm means: numpy, float32, one row at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rms_norm(x: NDArray[np.float32], scale: NDArray[np.float32], *, eps: float) -> NDArray[np.float32]:
    """Shapes as in `api.rms_norm`."""
    out = np.empty_like(x)
    for row in range(len(x)):
        out[row] = x[row] / np.sqrt(np.mean(x[row] ** 2) + np.float32(eps)) * scale
    return out


def add_rms_norm(
    x: NDArray[np.float32], delta: NDArray[np.float32], scale: NDArray[np.float32], *, eps: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Shapes as in `api.add_rms_norm`."""
    total = x + delta
    return total, rms_norm(total, scale, eps=eps)
