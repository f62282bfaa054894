"""What a file format must offer: its tensors' headers, and rows of one of them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
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


@runtime_checkable
class ColumnReader(Reader, Protocol):
    """Reads parts of rows, too."""

    def read_columns(self, name: str, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """[stop - start, last - first]: of rows [start, stop), their dimensions flattened, elements [first, last)."""
        ...


@runtime_checkable
class PartReader(Reader, Protocol):
    """Reads of tensors that are made of others what a part of them takes."""

    def read_part(self, name: str, part: Any, start: int, stop: int) -> np.ndarray | None:
        """Rows [start, stop), of which only what `part`, a `convert.slices.Part`, needs is right; None if it is none
        of them."""
        ...


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names in the files → the dtypes that weights are kept in."""

FLOATS = ("F64", *DTYPES, "F8_E4M3", "F8_E5M2")
"""What a weight may be stored in, by itself."""

FILE_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype(np.int8),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""safetensors' names, which PyTorch's files are given too."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file."""

    file: Path
    offset: int
    """In bytes, of its first element."""
    shape: tuple[int, ...]
    dtype: str
    """A key of FILE_DTYPES."""
    strides: tuple[int, ...] | None = None
    """In elements; None: row-major, without gaps."""

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, self.dtype, math.prod(self.shape) * FILE_DTYPES[self.dtype].itemsize)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop); of a tensor without dimensions, its value. Raises ValueError if the file ends before."""
        dtype = FILE_DTYPES[self.dtype]
        if self.strides is not None:
            return self._read_strided(dtype, start, stop)
        row = math.prod(self.shape[1:]) * dtype.itemsize
        rows = (stop - start,) if self.shape else ()
        # Read, not mapped: mapped pages count as memory.
        raw = np.fromfile(self.file, np.uint8, math.prod(rows) * row, offset=self.offset + start * row)
        if raw.size != math.prod(rows) * row:
            raise ValueError(f"{self.file} ends within a tensor: it has become shorter since it was opened")
        return raw.view(dtype).reshape((*rows, *self.shape[1:]))

    def read_columns(self, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Of rows [start, stop), their dimensions flattened, elements [first, last). Raises ValueError as `read`."""
        dtype, row = FILE_DTYPES[self.dtype], math.prod(self.shape[1:])
        if self.strides is not None:
            return self._read_strided(dtype, start, stop).reshape(stop - start, row)[:, first:last]
        out = np.empty((stop - start, (last - first) * dtype.itemsize), np.uint8)
        with self.file.open("rb", buffering=0) as opened:
            for number, part in enumerate(out, start):
                offset = self.offset + (number * row + first) * dtype.itemsize
                if os.preadv(opened.fileno(), [part], offset) != part.size:
                    raise ValueError(f"{self.file} ends within a tensor: it has become shorter since it was opened")
        return out.view(dtype)

    def _read_strided(self, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
        """Through a mapping that lasts for this call: the elements of a row lie far apart."""
        assert self.strides is not None
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        mapped = np.memmap(self.file, np.uint8, "r", self.offset, ((last + 1) * dtype.itemsize,))
        strides = [stride * dtype.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(mapped.view(dtype), self.shape, strides)
        return np.array(view[start:stop] if self.shape else view, order="C")


def whole(reader: Reader, name: str) -> np.ndarray:
    """All of a tensor, also of one without dimensions."""
    shape = reader.tensors[name].shape
    return reader.read(name, 0, shape[0] if shape else 1)


def has_nan(block: np.ndarray) -> bool:
    """Whether any element is NaN; told by its bits, which is much faster for the dtypes that numpy lacks.

    As signed integers positive ones are the largest, as unsigned ones negative ones.
    """
    size, largest = block.itemsize, _LARGEST[block.dtype]
    if not block.size:
        return False
    sign = 1 << (8 * size - 1)
    return bool(block.view(f"i{size}").max() > largest or block.view(f"u{size}").max() > largest + sign)


def _largest_bits(dtype: np.dtype) -> int:
    """Of a positive value: infinity's, or where there is none the largest finite value's."""
    infinity = np.array(np.inf).astype(dtype)
    value = infinity if np.isinf(infinity) else np.array(ml_dtypes.finfo(dtype).max, dtype)
    return int(value.view(f"u{dtype.itemsize}"))


_LARGEST = {FILE_DTYPES[name]: _largest_bits(FILE_DTYPES[name]) for name in FLOATS}


def main_dtype(tensors: Mapping[str, TensorInfo], names: Mapping[str, str], other: object = None) -> str:
    """The dtype that holds the most bytes, through `names`. One not listed there (a quantized one) is `other`, what the
    config calls its dtype, if we know that, and else float32.
    """
    totals: dict[str, int] = {}
    for info in tensors.values():
        totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
    default = next((name for name in names.values() if name == other), "float32")
    return names.get(max(totals, key=totals.__getitem__), default)
