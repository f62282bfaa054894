"""The header of a GGUF file: metadata and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader makes a numpy view of
every string, which takes seconds for a vocabulary; this one takes a tenth of one.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type → its struct code."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file."""

    shape: tuple[int, ...]
    """Rows first, as numpy counts."""
    type: int
    """A GGMLQuantizationType."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    metadata: dict[str, Any]
    """Key → number, string, boolean or list of them."""
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a little-endian GGUF file, version 2 or 3.

    Raises ValueError for anything else, for a file cut off within its header and for a tensor listed twice.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: its first bytes are not 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(_Cursor(data, 4), path)
            except (struct.error, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: the GGUF header is cut off or damaged; download the file again") from error


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap, position: int):
        self._data = data
        self.position = position

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self._data[self.position : self.position + length]
        if len(raw) != length:
            raise struct.error("string beyond the end of the file")
        self.position += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise struct.error(f"unknown value type {kind}")
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item not in _SCALARS:
            return [self.value(item) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, self.position)
        self.position += struct.calcsize(f"<{count}{_SCALARS[item]}")
        return list(values)


def _parse(cursor: _Cursor, path: Path) -> GgufHeader:
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"{path} is GGUF version {version}, or big-endian; little-endian versions 2 and 3 are read")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors: dict[str, StoredTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in tensors:
            raise ValueError(f"{path}: tensor {name} is listed twice")
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        tensors[name] = StoredTensor(tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    placed = {name: StoredTensor(t.shape, t.type, start + t.offset) for name, t in tensors.items()}
    return GgufHeader(metadata, placed)
