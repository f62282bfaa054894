"""Which slices of its source tensors a parameter's shards need, so that a process reads those of its devices only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.families.table import Source
from convert.joined import Joined, Reordered, Stacked
from convert.tensors import ColumnReader, PartReader, Reader
from convert.transforms import Slot
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Parameter, to_physical


@dataclass(frozen=True)
class Part:
    """What is needed of one source tensor: some columns of some rows."""

    rows: np.ndarray
    """[rows] bool"""
    columns: np.ndarray
    """[columns] bool; a tensor's dimensions after the first are its columns, flattened."""

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.rows.sum()) * int(self.columns.sum())

    def read(self, reader: Reader, name: str, start: int, stop: int) -> np.ndarray | None:
        """Rows [start, stop), zeros where nothing is needed; None if nothing is.

        Of a reader that reads whole rows only, all columns are read.
        """
        if isinstance(reader, PartReader):
            return reader.read_part(name, self, start, stop)
        if not self.rows[start:stop].any():
            return None
        if self.columns.all() and self.rows[start:stop].all():
            return reader.read(name, start, stop)
        out: np.ndarray | None = None
        for first, last in _runs(self.rows[start:stop]):
            for columns, piece in self._pieces(reader, name, start + first, start + last):
                if out is None:
                    out = np.zeros((stop - start, self.columns.size), piece.dtype)
                out[first:last, columns] = piece
        return None if out is None else out.reshape(stop - start, *reader.tensors[name].shape[1:])

    def _pieces(self, reader: Reader, name: str, start: int, stop: int) -> Iterator[tuple[slice, np.ndarray]]:
        if self.columns.all() or not isinstance(reader, ColumnReader):
            yield slice(None), reader.read(name, start, stop).reshape(stop - start, -1)
            return
        for first, last in _runs(self.columns):
            yield slice(first, last), reader.read_columns(name, start, stop, first, last)


def needed(
    path: str, parameter: Parameter, config: ModelConfig, physical: ModelConfig, leaf: Any, devices: Iterable[Any]
) -> np.ndarray | None:
    """Which elements of a canonical weight these devices hold: bool, to be broadcast to its shape; None: all.

    parameter: as `config` declares it; leaf: its shape and sharding as `physical` declares it.
    """
    spec = (*leaf.sharding.spec, *[None] * len(leaf.shape))
    mesh = leaf.sharding.mesh.shape
    kept = {axis for axis in range(len(leaf.shape)) if spec[axis] is not None and mesh[spec[axis]] > 1}
    if not kept:
        return None
    # The query heads of a kv head are split where a mesh has more devices than there are kv heads.
    kept |= {axis + 1 for axis in kept if parameter.axes[axis] == "kv_heads"}
    shape = [dim if axis in kept else 1 for axis, dim in enumerate(parameter.shape)]
    # Numbered from 1, since rows that pad the vocabulary are 0.
    laid_out = to_physical(path, np.arange(1, math.prod(shape) + 1).reshape(shape), config, physical)
    wanted = np.zeros(math.prod(shape) + 1, bool)
    places = leaf.sharding.devices_indices_map(leaf.shape)
    for device in devices:
        index = [place if axis in kept else slice(None) for axis, place in enumerate(places[device])]
        wanted[laid_out[tuple(index)]] = True
    return None if wanted[1:].all() else wanted[1:].reshape(shape)


def parts(source: Source, wanted: np.ndarray, parameter: Parameter, config: ModelConfig) -> list[Part]:
    """What `wanted`, of `needed`, takes of each source tensor. At least those elements, and a rectangle of each."""
    slots = source.transform(np.broadcast_to(wanted, parameter.shape), config)
    return [_part(slot) for slot in slots]


def _part(slot: Slot) -> Part:
    if isinstance(slot, Joined):
        each = [_part(part) for part in slot.parts]
        all_rows, all_columns = [part.rows for part in each], [part.columns for part in each]
        if slot.axis:
            return Part(np.any(all_rows, axis=0), np.concatenate(all_columns))
        return Part(np.concatenate(all_rows), np.any(all_columns, axis=0))
    if isinstance(slot, Stacked):
        each = [_part(part) for part in slot.parts]
        inner = [np.outer(part.rows, part.columns).reshape(-1) for part in each if part.size]
        return Part(np.array([part.size > 0 for part in each]), np.any(inner, axis=0))
    # Along axes without strides all is alike: one element stands for them.
    view = slot.view[tuple(slice(None) if stride else slice(1) for stride in slot.view.strides)]
    axes, shape = tuple(range(view.ndim)), slot.view.shape
    rows = np.broadcast_to(view.any(axis=axes[slot.rows :]), shape[: slot.rows]).reshape(-1)
    columns = np.broadcast_to(view.any(axis=axes[: slot.rows]), shape[slot.rows :]).reshape(-1)
    if isinstance(slot, Reordered):
        rows = rows.reshape(-1, len(slot.order))[:, np.argsort(slot.order)].reshape(-1)
    return Part(rows, columns)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(first, one past the last) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))
