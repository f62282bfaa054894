"""Reads `model.safetensors`, or the shards that its index lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.shards import load_json, stored_tensors
from convert.tensors import FILE_DTYPES, Stored

SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # the format's own limit


class SafetensorsReader:
    """The tensors of a folder. Raises ValueError for duplicates, missing shards and damaged files."""

    def __init__(self, folder: Path, single: str = SINGLE):
        self._stored = stored_tensors(folder, single, read_headers)
        self.tensors = {name: stored.info for name, stored in self._stored.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in the stored dtype."""
        return self._stored[name].read(start, stop)

    def read_columns(self, name: str, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of those rows, flattened."""
        return self._stored[name].read_columns(start, stop, first, last)


def read_headers(file: Path) -> dict[str, Stored]:
    """Name → place. Raises ValueError, naming the tensor, for what does not lie within the file or overlaps."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or 8 + length > size or length > _LARGEST_HEADER:
            raise ValueError(
                f"{file} is cut short, or no safetensors file: {size} bytes, of which a header is to take {length}"
            )
        header = load_json(opened.read(length), f"{file}: its header is damaged")
    if not isinstance(header, dict):
        raise ValueError(f"{file}: its header is no JSON object")
    header.pop("__metadata__", None)
    stored = {name: _place(name, entry, 8 + length, size, file) for name, entry in header.items()}
    _check_disjoint(stored, file)
    return stored


def _place(name: str, entry: Any, first: int, size: int, file: Path) -> Stored:
    if not isinstance(entry, dict):
        raise ValueError(f"{file}: the header of {name} is damaged")
    dtype, shape, offsets = entry.get("dtype"), _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(dtype, str):
        raise ValueError(f"{file}: the header of {name} is damaged")
    if dtype not in FILE_DTYPES:
        raise ValueError(f"{file}: {name} is of the unknown dtype {dtype}; known: {', '.join(FILE_DTYPES)}")
    begin, end = offsets
    if begin > end or first + end > size:
        raise ValueError(
            f"{file}: {name} is said to take bytes {begin} to {end}, but only {size - first} are there; the file is "
            "cut short or damaged: download it again"
        )
    nbytes = math.prod(shape) * FILE_DTYPES[dtype].itemsize
    if nbytes != end - begin:
        raise ValueError(f"{file}: {name} has {end - begin} bytes, but {dtype} {list(shape)} takes {nbytes}")
    return Stored(file, first + begin, shape, dtype)


def _naturals(values: Any) -> tuple[int, ...] | None:
    """As a tuple; None for anything that is not a list of them."""
    valid = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return tuple(values) if valid else None


def _check_disjoint(stored: Mapping[str, Stored], file: Path) -> None:
    reached, before = 0, ""
    for name, place in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].info.nbytes)):
        if place.info.nbytes and place.offset < reached:
            raise ValueError(f"{file}: {before} and {name} overlap; the file is damaged")
        reached, before = place.offset + place.info.nbytes, name
