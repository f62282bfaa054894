"""Reads `model.safetensors`, or the shards that its index lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401  (gives numpy the bfloat16 that safetensors asks it for)
import numpy as np
from safetensors import safe_open

from convert.families.table import some
from convert.tensors import TensorInfo

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""safetensors' name → ours."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsReader:
    """The tensors of a folder. Raises ValueError for duplicates, missing shards and dtypes other than floats."""

    def __init__(self, folder: Path):
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Path] = {}
        duplicates = []
        for file in _shards(folder):
            for name, info in _headers(file):
                if name in self._files:
                    duplicates.append(f"{name} ({self._files[name].name} and {file.name})")
                self._files[name], self.tensors[name] = file, info
        if duplicates:
            raise ValueError(f"{folder}: tensors stored twice: {some(duplicates)}")
        odd = [f"{name} ({info.dtype})" for name, info in self.tensors.items() if info.dtype not in DTYPES]
        if odd:
            raise ValueError(f"{folder}: tensors of unsupported dtypes: {some(odd)}; supported: {', '.join(DTYPES)}")

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in the stored dtype. The file is mapped anew each time: mapped pages count as memory."""
        with safe_open(self._files[name], "np") as file:
            rows: np.ndarray = file.get_slice(name)[start:stop]
        return rows


def _shards(folder: Path) -> list[Path]:
    """The files to read. Raises FileNotFoundError or ValueError if they are not there or do not match the index."""
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise FileNotFoundError(
                f"{folder} has no {_SINGLE} and no {_INDEX}; weights in other formats (.bin, .pth) are not read: "
                "save them with transformers' save_pretrained first"
            )
        return [folder / _SINGLE]
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = [folder / name for name in sorted(set(weight_map.values()))]
    if absent := [file.name for file in files if not file.exists()]:
        raise FileNotFoundError(
            f"{folder}: {_INDEX} lists files that are not there: {some(absent)}; download them again"
        )
    return files


def _headers(file: Path) -> Iterator[tuple[str, TensorInfo]]:
    with safe_open(file, "np") as opened:
        for name in opened.keys():  # noqa: SIM118  (it is not a dict)
            header = opened.get_slice(name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            yield name, TensorInfo(shape, dtype, int(np.prod(shape)) * _ITEM_BYTES.get(dtype, 1))


_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
