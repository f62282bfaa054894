"""Reads `pytorch_model.bin`, or the shards that its index lists, without torch and without running any of it."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convert.shards import stored_tensors
from convert.tensors import FILE_DTYPES, Stored
from convert.torch_pickle import PickledTensor, Storage, read_inert, read_pickle

SINGLE = "pytorch_model.bin"
_LARGEST_PICKLE = 256 << 20  # headers of a million tensors; what lies in records of their own is not limited


class TorchReader:
    """The tensors of a folder's `.bin` files.

    Raises ValueError for damaged files, tensors that do not lie within them, and pickles of anything but tensors.
    """

    def __init__(self, folder: Path):
        self._stored = stored_tensors(folder, SINGLE, read_headers)
        self.tensors = {name: stored.info for name, stored in self._stored.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in the stored dtype."""
        return self._stored[name].read(start, stop)

    def read_columns(self, name: str, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of those rows, flattened."""
        return self._stored[name].read_columns(start, stop, first, last)


def read_headers(file: Path) -> dict[str, Stored]:
    """Name → place, for the dictionary of tensors that `file` holds. Raises ValueError as TorchReader does."""
    values, records = _unpickled(file, read_pickle)
    odd = not isinstance(values, dict) or [
        key for key, value in values.items() if not isinstance(key, str) or not isinstance(value, PickledTensor)
    ]
    if odd:
        found = f"it holds {', '.join(map(repr, odd[:10]))}" if isinstance(odd, list) else "it holds no dictionary"
        raise ValueError(f"{file} is refused: {found}; only a dictionary of tensors by their names is read")
    return {name: _place(name, tensor, records, file) for name, tensor in values.items()}


def read_state(file: Path) -> tuple[Any, Callable[[str, PickledTensor], Stored]]:
    """What `read_inert` makes of a file that holds more than tensors, and what tells where one of those lies.

    Raises ValueError for damaged files, the second for a tensor, of this name, that does not lie within the file.
    """
    values, records = _unpickled(file, read_inert)
    return values, lambda name, tensor: _place(name, tensor, records, file)


def _unpickled(file: Path, read: Callable[[bytes], Any]) -> tuple[Any, dict[str, tuple[int, int]]]:
    records = _records(file)
    start, size = _record(records, "data.pkl", file)
    order = records.get("byteorder")
    if size > _LARGEST_PICKLE:
        raise ValueError(f"{file}: its pickle has {size} bytes; at most {_LARGEST_PICKLE} are read")
    with file.open("rb") as opened:
        if order is not None:
            opened.seek(order[0])
            if opened.read(order[1]) != b"little":
                raise ValueError(f"{file} was written on a big-endian machine, which is not read")
        opened.seek(start)
        data = opened.read(size)
    try:
        return read(data), records
    except ValueError as error:
        raise ValueError(
            f"{file} is refused: {error}. Only a dictionary of tensors is read, and no code is run; if you trust the "
            "file, save its state dict as safetensors"
        ) from error


def _records(file: Path) -> dict[str, tuple[int, int]]:
    """Record, without the archive's own folder → (first byte, size). The records are stored as they are, not packed."""
    with file.open("rb") as opened:
        magic, end = opened.read(4), file.stat().st_size
        if magic != b"PK\x03\x04":
            raise ValueError(
                f"{file} is not in the zip format that torch.save writes since PyTorch 1.6 (nor is anything older "
                "read); load it with torch and save it again, best as safetensors"
            )
        try:
            entries = zipfile.ZipFile(opened).infolist()
        except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is cut short or damaged: {error}; download it again") from error
        records: dict[str, tuple[int, int]] = {}
        for entry in entries:
            name = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(
                    f"{file}: its record {entry.filename} is compressed or encrypted, as torch's never are"
                )
            opened.seek(max(entry.header_offset, 0))
            header = opened.read(30)
            first = entry.header_offset + 30 + int.from_bytes(header[26:28], "little")
            first += int.from_bytes(header[28:30], "little")
            if entry.header_offset < 0 or header[:4] != magic or first + entry.file_size > end or name in records:
                raise ValueError(f"{file} is damaged: its record {entry.filename} is not where its directory says")
            records[name] = (first, entry.file_size)
    return records


def _record(records: dict[str, tuple[int, int]], name: str, file: Path) -> tuple[int, int]:
    if name not in records:
        raise ValueError(f"{file} has no record {name}: it is no file of torch.save's, or damaged")
    return records[name]


def _place(name: str, tensor: PickledTensor, records: dict[str, tuple[int, int]], file: Path) -> Stored:
    storage, item = tensor.storage, FILE_DTYPES[tensor.dtype].itemsize
    first, size = _record(records, f"data/{storage.key}", file)
    if storage.size * _unit(storage) > size:
        raise ValueError(f"{file}: the storage of {name} has {storage.size} elements, its record {size} bytes")
    if 0 in tensor.shape:
        return Stored(file, first, tensor.shape, tensor.dtype)
    last = tensor.offset + sum((dim - 1) * step for dim, step in zip(tensor.shape, tensor.strides))
    if (last + 1) * item > storage.size * _unit(storage):
        raise ValueError(f"{file}: {name} reaches beyond its storage")
    strides = None if tensor.strides == _row_major(tensor.shape) else _disjoint(name, tensor, file)
    return Stored(file, first + tensor.offset * item, tensor.shape, tensor.dtype, strides)


def _unit(storage: Storage) -> int:
    return 1 if storage.dtype is None else FILE_DTYPES[storage.dtype].itemsize


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _disjoint(name: str, tensor: PickledTensor, file: Path) -> tuple[int, ...]:
    """The strides. Raises ValueError if an element of the storage may be two of the tensor's."""
    reached = 0  # by the dimensions of smaller strides
    for step, dim in sorted(zip(tensor.strides, tensor.shape)):
        if dim > 1 and step <= reached:
            raise ValueError(f"{file}: elements of {name} overlap (shape {tensor.shape}, strides {tensor.strides})")
        reached += (dim - 1) * step
    return tuple(step if dim > 1 else 0 for step, dim in zip(tensor.strides, tensor.shape))
