"""Tensors that lie in several files, a piece for each tensor-parallel rank, read as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from convert.tensors import FILE_DTYPES, Stored, TensorInfo


class Tensor(Protocol):
    """What `MergedReader` needs of one; the arguments are those of its own methods."""

    @property
    def info(self) -> TensorInfo: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...

    def read_columns(self, start: int, stop: int, first: int, last: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Rows:
    """Runs of rows, one after another."""

    runs: tuple[tuple[Stored, int, int], ...]
    """(tensor, first row, number of rows), of one dtype and of rows of one shape."""

    @property
    def info(self) -> TensorInfo:
        stored = self.runs[0][0]
        shape = (sum(rows for _, _, rows in self.runs), *stored.shape[1:])
        return TensorInfo(shape, stored.dtype, math.prod(shape) * FILE_DTYPES[stored.dtype].itemsize)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.concatenate([stored.read(low, high) for stored, low, high in self._within(start, stop)])

    def read_columns(self, start: int, stop: int, first: int, last: int) -> np.ndarray:
        found = self._within(start, stop)
        return np.concatenate([stored.read_columns(low, high, first, last) for stored, low, high in found])

    def _within(self, start: int, stop: int) -> Iterator[tuple[Stored, int, int]]:
        """(tensor, its first row, one past its last) for rows [start, stop)."""
        before = 0
        for stored, first, rows in self.runs:
            low, high = max(start - before, 0), min(stop - before, rows)
            if low < high:
                yield stored, first + low, first + high
            before += rows

    def cut(self, rows: int) -> Rows:
        """The first `rows` of them."""
        within = self._within(0, rows)
        return Rows(tuple((stored, start, stop - start) for stored, start, stop in within))


@dataclass(frozen=True)
class Columns:
    """Matrices side by side."""

    parts: tuple[Stored, ...]

    @property
    def info(self) -> TensorInfo:
        stored = self.parts[0]
        shape = (stored.shape[0], sum(part.shape[1] for part in self.parts))
        return TensorInfo(shape, stored.dtype, math.prod(shape) * FILE_DTYPES[stored.dtype].itemsize)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.concatenate([part.read(start, stop) for part in self.parts], axis=1)

    def read_columns(self, start: int, stop: int, first: int, last: int) -> np.ndarray:
        pieces, before = [], 0
        for part in self.parts:
            low, high = max(first - before, 0), min(last - before, part.shape[1])
            if low < high:
                pieces.append(part.read_columns(start, stop, low, high))
            before += part.shape[1]
        return np.concatenate(pieces, axis=1)


class MergedReader:
    """Reads rows and columns of merged tensors, only from the files that hold them."""

    def __init__(self, merged: Mapping[str, Tensor]):
        self._merged = merged
        self.tensors = {name: tensor.info for name, tensor in merged.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in the stored dtype."""
        return self._merged[name].read(start, stop)

    def read_columns(self, name: str, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of those rows, flattened."""
        return self._merged[name].read_columns(start, stop, first, last)
