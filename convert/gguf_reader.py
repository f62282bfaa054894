"""Reads tensors of a GGUF file, dequantized to float32 by the gguf package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.families.table import some
from convert.gguf_header import GgufHeader, gguf_package
from convert.tensors import Stored, TensorInfo

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""GGUF's types that are not quantized → ours."""

_STORED: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_QUANTIZED = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)


class GgufReader:
    """The tensors of a file. Raises ValueError for quantized types not supported."""

    def __init__(self, path: Path, header: GgufHeader):
        self._gguf = gguf_package()
        self.tensors: dict[str, TensorInfo] = {}
        self._bytes: dict[str, Stored] = {}
        refused = []
        for name, tensor in header.tensors.items():
            kind = self._kind(tensor.type)
            if kind not in _STORED and kind not in _QUANTIZED:
                refused.append(f"{name} ({kind})")
                continue
            block, size = self._block(kind)
            nbytes = math.prod(tensor.shape) // block * size
            self.tensors[name] = TensorInfo(tensor.shape, kind, nbytes)
            self._bytes[name] = Stored(path, tensor.offset, (tensor.shape[0], nbytes // tensor.shape[0]), "U8")
        if refused:
            raise ValueError(
                f"{path}: quantization types not supported: {some(refused)}; "
                f"supported: {', '.join([*_STORED, *_QUANTIZED])}"
            )

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): float32 if quantized, else in the stored dtype."""
        return self._values(name, self._bytes[name].read(start, stop)).reshape(-1, *self.tensors[name].shape[1:])

    def read_columns(self, name: str, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of those rows, flattened; the blocks that hold them are read."""
        block, size = self._block(self.tensors[name].dtype)
        low, high = first // block, -(-last // block)
        values = self._values(name, self._bytes[name].read_columns(start, stop, low * size, high * size))
        return values[:, first - low * block : last - low * block]

    def _values(self, name: str, raw: np.ndarray) -> np.ndarray:
        """[rows, bytes] → [rows, elements]."""
        kind = self.tensors[name].dtype
        if kind in _STORED:
            return raw.view(_STORED[kind])
        values: np.ndarray = self._gguf.dequantize(raw, self._gguf.GGMLQuantizationType[kind])
        return values

    def _block(self, kind: str) -> tuple[int, int]:
        """Elements, and the bytes that they take."""
        elements, nbytes = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType[kind]]
        return elements, nbytes

    def _kind(self, number: int) -> str:
        kinds = {int(kind): kind.name for kind in self._gguf.GGMLQuantizationType}
        return kinds.get(number, f"type {number}")
