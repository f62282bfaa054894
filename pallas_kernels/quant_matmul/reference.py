"""What quant_matmul means: numpy, float32, one group of inputs at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pallas_kernels.formats import QuantizedArray

Array = NDArray[np.float32]


def unpacked(packed: NDArray[np.uint8]) -> Array:
    """[outputs, inputs / 2] bytes to [outputs, inputs], one input at a time; the order is `formats.pack_int4`'s."""
    words = np.ascontiguousarray(packed).view("<u4")
    out = np.empty((len(packed), packed.shape[1] * 2), np.float32)
    for i in range(out.shape[1]):
        word, shift = i // 32 * 4 + i % 8 // 2, 16 * (i % 2) + 8 * (i // 16 % 2) + 4 * (i // 8 % 2)
        out[:, i] = ((words[:, word] >> shift) & 15).astype(np.float32) - 8
    return out


def weight_of(weight: QuantizedArray) -> Array:
    """[outputs, inputs], scale x (value - zero)."""
    scales = np.asarray(weight.scales).astype(np.float32)
    if weight.format != "int4":
        values = np.asarray(weight.values).astype(np.float32)
        return values.reshape(-1, weight.inputs) * scales.reshape(-1, 1)
    assert weight.group_size is not None
    values = unpacked(np.asarray(weight.values).reshape(-1, weight.inputs // 2))
    groups, size = weight.inputs // weight.group_size, weight.group_size
    scales = scales.reshape(-1, groups)
    zeros = np.zeros_like(scales) if weight.zeros is None else np.asarray(weight.zeros).astype(np.float32)
    zeros = zeros.reshape(-1, groups)
    for group in range(groups):
        inputs = slice(group * size, (group + 1) * size)
        values[:, inputs] = scales[:, group, None] * (values[:, inputs] - zeros[:, group, None])
    return values


def rounded(x: Array, largest: float, dtype: Any) -> Array:
    """Each row as it reads back from 8 bits with a scale of its own."""
    scales = np.abs(x).max(axis=1, keepdims=True, initial=0.0) / largest
    stored = x / np.where(scales == 0.0, 1.0, scales)
    read = (np.rint(stored) if dtype == np.int8 else stored).astype(dtype).astype(np.float32)
    return np.multiply(read, scales, dtype=np.float32)


def quant_matmul(x: Array, weight: QuantizedArray, activations: str | None = None) -> Array:
    """x: [rows, inputs]. Returns [rows, *outputs] f32."""
    if activations is not None:
        x = rounded(x, 127.0, np.int8) if activations == "int8" else rounded(x, 448.0, weight.values.dtype)
    return (x @ weight_of(weight).T).reshape(len(x), *weight.outputs)
