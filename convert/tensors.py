"""What a file format must offer: its tensors' headers, and rows of one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, from its header."""

    shape: tuple[int, ...]
    dtype: str
    """As the file names it: BF16, F32, Q4_K …"""
    nbytes: int


class Reader(Protocol):
    """Reads tensors without keeping any of them, or pages of the file, in memory."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor, dequantized to float32 if quantized, else in the stored dtype."""
        ...


def main_dtype(tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> str:
    """The dtype that holds the most bytes, through `names`; one not listed there (a quantized one) is float32."""
    totals: dict[str, int] = {}
    for info in tensors.values():
        totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    return names.get(max(totals, key=totals.__getitem__), "float32")
