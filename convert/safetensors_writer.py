"""Writes `model.safetensors`, or shards and their index, a block at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.journal import Journal
from convert.safetensors_reader import SINGLE
from convert.tensors import FILE_DTYPES


@dataclass(frozen=True)
class Outgoing:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of FILE_DTYPES."""
    blocks: Callable[[], Iterable[np.ndarray]]
    """Its rows, in order, of this dtype."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * FILE_DTYPES[self.dtype].itemsize


def write(
    folder: Path,
    tensors: list[Outgoing],
    shard_bytes: int,
    update: Callable[[int], object],
    finished: Journal | None = None,
) -> None:
    """Write the tensors, in their order, to files of at most `shard_bytes`, or of one tensor.

    `update` takes the bytes written. Files that `finished` holds are kept, and others noted there. Raises ValueError
    for a tensor whose blocks do not add up to its shape.
    """
    shards = list(_shards(tensors, shard_bytes))
    stem, suffix = SINGLE.split(".")
    names = [f"{stem}-{number + 1:05}-of-{len(shards):05}.{suffix}" for number in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    for name, members in zip(names, shards):
        if finished is not None and finished.holds(name, folder / name):
            update(sum(tensor.nbytes for tensor in members))
            continue
        _write_file(folder / name, members, update)
        if finished is not None:
            finished.record(name, folder / name)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, members in zip(names, shards) for tensor in members}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
        (folder / f"{SINGLE}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: list[Outgoing], shard_bytes: int) -> Iterator[list[Outgoing]]:
    members: list[Outgoing] = []
    for tensor in tensors:
        if members and sum(member.nbytes for member in members) + tensor.nbytes > shard_bytes:
            yield members
            members = []
        members.append(tensor)
    yield members


def _write_file(path: Path, tensors: list[Outgoing], update: Callable[[int], object]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data is to be aligned
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            start = out.tell()
            for block in tensor.blocks():
                out.write(np.ascontiguousarray(block, FILE_DTYPES[tensor.dtype]).view(np.uint8))
                update(block.nbytes)
            if out.tell() - start != tensor.nbytes:
                raise ValueError(f"{tensor.name} has {out.tell() - start} bytes; its header says {tensor.nbytes}")
