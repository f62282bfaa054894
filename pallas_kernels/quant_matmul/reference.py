"""What quant_matmul means: numpy, float32, one group of inputs at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pallas_kernels.formats import QuantizedArray

Array = NDArray[np.float32]


def half(byte: NDArray[np.uint8], shift: int) -> Array:
    """Four bits of each byte as a two's complement number."""
    bits = (byte.astype(np.int32) >> shift) & 15
    return np.where(bits < 8, bits, bits - 16).astype(np.float32)


def weight_of(weight: QuantizedArray) -> Array:
    """[outputs, inputs], scale x (value - zero)."""
    scales = np.asarray(weight.scales).astype(np.float32)
    if weight.format != "int4":
        values = np.asarray(weight.values).astype(np.float32)
        return values.reshape(-1, weight.inputs) * scales.reshape(-1, 1)
    assert weight.group_size is not None
    packed = np.asarray(weight.values).reshape(-1, weight.inputs // 2)
    groups, size = weight.inputs // weight.group_size, weight.group_size
    scales = scales.reshape(-1, groups)
    zeros = np.zeros_like(scales) if weight.zeros is None else np.asarray(weight.zeros).astype(np.float32)
    out = np.empty((len(packed), weight.inputs), np.float32)
    for group in range(groups):
        stored = packed[:, group * size // 2 : (group + 1) * size // 2]
        values = np.concatenate([half(stored, 0), half(stored, 4)], axis=1)
        zero, scale = zeros.reshape(-1, groups)[:, group], scales[:, group]
        out[:, group * size : (group + 1) * size] = scale[:, None] * (values - zero[:, None])
    return out


def rounded(x: Array, largest: float, dtype: Any) -> Array:
    """Each row as it reads back from 8 bits with a scale of its own."""
    scales = np.abs(x).max(axis=1, keepdims=True, initial=0.0) / largest
    stored = x / np.where(scales == 0.0, 1.0, scales)
    read: Array = (np.rint(stored) if dtype == np.int8 else stored).astype(dtype).astype(np.float32)
    return read * scales


def quant_matmul(x: Array, weight: QuantizedArray, activations: str | None = None) -> Array:
    """x: [rows, inputs]. Returns [rows, *outputs] f32."""
    if activations is not None:
        x = rounded(x, 127.0, np.int8) if activations == "int8" else rounded(x, 448.0, weight.values.dtype)
    return (x @ weight_of(weight).T).reshape(len(x), *weight.outputs)
