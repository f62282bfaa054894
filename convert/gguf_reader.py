"""Reads tensors of a GGUF file, dequantized to float32 by the gguf package."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.families.table import some
from convert.gguf_header import GgufHeader, gguf_package
from convert.tensors import TensorInfo

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
        self._path = path
        self._header = header
        self._gguf = gguf_package()
        self.tensors: dict[str, TensorInfo] = {}
        refused = []
        for name, tensor in header.tensors.items():
            kind = self._kind(tensor.type)
            if kind not in _STORED and kind not in _QUANTIZED:
                refused.append(f"{name} ({kind})")
                continue
            block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType[kind]]
            nbytes = math.prod(tensor.shape) // block * size
            self.tensors[name] = TensorInfo(tensor.shape, kind, nbytes)
        if refused:
            raise ValueError(
                f"{path}: quantization types not supported: {some(refused)}; "
                f"supported: {', '.join([*_STORED, *_QUANTIZED])}"
            )

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): float32 if quantized, else in the stored dtype."""
        info = self.tensors[name]
        row_bytes = info.nbytes // info.shape[0]
        offset = self._header.tensors[name].offset + start * row_bytes
        # Read, not mapped: mapped pages count as memory.
        raw = np.fromfile(self._path, np.uint8, (stop - start) * row_bytes, offset=offset)
        if info.dtype in _STORED:
            return raw.view(_STORED[info.dtype]).reshape(stop - start, *info.shape[1:])
        rows: np.ndarray = self._gguf.dequantize(
            raw.reshape(stop - start, row_bytes), self._gguf.GGMLQuantizationType[info.dtype]
        )
        return rows

    def _kind(self, number: int) -> str:
        kinds = {int(kind): kind.name for kind in self._gguf.GGMLQuantizationType}
        return kinds.get(number, f"type {number}")
