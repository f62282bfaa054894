"""Quantized weights that are made before they are wanted, on disk so that memory holds one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.journal import Journal
from jaxinfer.parameters import parts_of
from pallas_kernels.formats import QuantizedArray


class Ready(Mapping[str, QuantizedArray]):
    """Path → quantized weight, whose parts are numpy arrays; read from a folder each time."""

    def __init__(self, folder: Path, finished: Journal | None = None):
        """folder: an empty one, or with `finished`, its journal, one that an interrupted run left."""
        self._folder, self._finished = folder, finished
        self._weights: dict[str, QuantizedArray] = {}

    def put(self, path: str, weight: QuantizedArray) -> None:
        parts: dict[str, Any] = {name: np.asarray(part) for name, part in parts_of(weight).items()}
        for name, part in parts.items():
            part.tofile(self._file(path, name))
            if self._finished is not None:
                self._finished.record(f"{path}.{name}", self._file(path, name))
            parts[name] = _Shape(part.shape, part.dtype)
        self._weights[path] = dataclasses.replace(weight, **parts)

    def find(self, path: str, like: QuantizedArray) -> bool:
        """Whether this weight is there, of this run or an interrupted one. like: it, of jax.ShapeDtypeStruct."""
        if path in self._weights:
            return True
        parts: dict[str, Any] = {name: _Shape(part.shape, part.dtype) for name, part in parts_of(like).items()}
        if self._finished is None or not all(
            self._finished.holds(f"{path}.{name}", self._file(path, name)) for name in parts
        ):
            return False
        self._weights[path] = dataclasses.replace(like, **parts)
        return True

    def __getitem__(self, path: str) -> QuantizedArray:
        weight = self._weights[path]
        parts: dict[str, Any] = {
            name: np.fromfile(self._file(path, name), part.dtype).reshape(part.shape)
            for name, part in parts_of(weight).items()
        }
        return dataclasses.replace(weight, **parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def _file(self, path: str, part: str) -> Path:
        return self._folder / f"{path}.{part}"


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What a file does not say itself."""

    shape: tuple[int, ...]
    dtype: np.dtype
