"""A weight that is stored as several tensors, presented as the one that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np

from convert.slices import Part
from convert.tensors import FILE_DTYPES, Reader, TensorInfo, whole
from jaxinfer.config import WeightFormat

type Along = tuple[Literal["experts", "outputs", "inputs", "elements"], Fraction | int]
"""A dimension of a weight, or its elements in order, and how much of that an entry of a stored tensor holds."""

type Follows = tuple[Along | None, ...]
"""For each dimension of a stored tensor, what it goes along with; None: all of it belongs to every part."""

type Rows = Callable[[int, int], np.ndarray]
"""Rows [start, stop) of a weight, float32."""


type LowRows = Callable[[int, int], tuple[np.ndarray, np.ndarray, np.ndarray | None]]
"""Rows [start, stop): values [rows, inputs] of the format's dtype (int4: int8 in -8..7; mxfp4: uint8, packed as in
`pallas_kernels.formats`), scales [rows, groups] float32 (mxfp4: uint8), and zeros like them or none.
"""


@dataclass(frozen=True)
class LowBit:
    """That a weight is stored as one of our own formats holds it, so that it need not become floats.

    weight = (value - zero) · scale, with a scale for each output, or for each output and `group_size` inputs.
    """

    format: WeightFormat
    group_size: int | None
    symmetric: bool
    open: Callable[[], LowRows]
    inputs_first: bool = False
    """Rows are experts, each presented as [inputs, outputs]: values [rows, inputs, outputs], packed half as many, and
    scales [rows, groups, outputs]."""


GROUP_SIZES = (32, 64, 128)
"""Those of `pallas_kernels.formats`, without its import of jax."""


@dataclass(frozen=True)
class Packed:
    """One such weight."""

    name: str
    """What a family's table calls it."""
    shape: tuple[int, ...]
    kind: str
    """For people: `GPTQ 4-bit`."""
    parts: tuple[str, ...]
    """The stored tensors that it takes the place of."""
    open: Callable[[], Rows]
    """Reads what all its rows need."""
    low_bit: LowBit | None = None
    follows: Mapping[str, Follows] = field(default_factory=dict)
    """Of stored tensors: what a part of the weight takes of them. The others are read whole."""


class DequantizingReader:
    """The tensors of `reader`, with packed weights in place of their parts."""

    def __init__(self, reader: PartialReader, packed: Iterable[Packed], hidden: Iterable[str] = ()):
        """reader: the one through which `packed` read. hidden: tensors that are not presented."""
        self._reader = reader
        self._packed = {weight.name: weight for weight in packed}
        parts = set(hidden) | {part for weight in self._packed.values() for part in weight.parts}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in reader.tensors.items() if name not in parts
        } | {name: _info(weight, reader) for name, weight in self._packed.items()}
        self._opened: tuple[str, Part | None, Rows] | None = None

    def low_bit(self, name: str) -> LowBit | None:
        """How a weight may be kept as it is; None: only as floats."""
        return self._packed[name].low_bit if name in self._packed else None

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): float32 if packed, else as stored. What a packed weight's rows share is read once and
        kept until another weight is read.
        """
        if name in self._packed:
            return self._rows(name, None)(start, stop)
        self._opened, self._reader.parts = None, {}
        return self._reader.read(name, start, stop)

    def read_part(self, name: str, part: Part, start: int, stop: int) -> np.ndarray | None:
        """The same rows, of which only what `part` needs is read, and right; None if it needs none of them."""
        if not part.rows[start:stop].any():
            return None
        if name in self._packed:
            return self._rows(name, part)(start, stop)
        self._opened, self._reader.parts = None, {name: part}
        return self._reader.read(name, start, stop)

    def _rows(self, name: str, part: Part | None) -> Rows:
        if self._opened is None or self._opened[0] != name or self._opened[1] is not part:
            self._opened = None  # the last one goes before the next comes
            self.narrow(name, part)
            self._opened = name, part, self._packed[name].open()
        return self._opened[2]

    def narrow(self, name: str, part: Part | None) -> None:
        """From now on read of this weight's tensors only what `part` of it takes; None: all."""
        self._reader.parts = {} if part is None else _stored_parts(self._packed[name], part, self._reader)


class PartialReader:
    """The tensors of `reader`, of some of which only parts are read."""

    def __init__(self, reader: Reader):
        self._reader, self.tensors = reader, reader.tensors
        self.parts: Mapping[str, Part] = {}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop); what no part needs is like something that one does, so that checks of all hold."""
        part, info = self.parts.get(name), self.tensors[name]
        if part is None:
            return self._reader.read(name, start, stop)
        rows = part.read(self._reader, name, start, stop)
        if rows is None:
            return np.zeros((stop - start, *info.shape[1:]), FILE_DTYPES[info.dtype])
        flat, there = rows.reshape(len(rows), -1), part.rows[start:stop]
        flat[:, ~part.columns] = flat[:, [part.columns.argmax()]]
        flat[~there] = flat[there.argmax()]
        return rows


def _stored_parts(weight: Packed, part: Part, reader: Reader) -> dict[str, Part]:
    """Of each stored tensor that follows the weight, what `part` of this takes."""
    if len(weight.shape) == 2:
        needed = {"outputs": part.rows, "inputs": part.columns}
    else:
        columns = part.columns.reshape(weight.shape[1:])
        needed = {"experts": part.rows, "inputs": columns.any(1), "outputs": columns.any(0)}
    found = {}
    for name, follows in weight.follows.items():
        masks = []
        for size, along in zip(reader.tensors[name].shape, follows, strict=True):
            if along is None:
                masks.append(np.ones(size, bool))
            elif along[0] == "elements":
                masks.append(_entries(np.outer(part.rows, part.columns).reshape(-1), along[1], size))
            else:
                masks.append(_entries(needed[along[0]], along[1], size))
        columns = np.ones(1, bool)
        for mask in masks[1:]:
            columns = np.outer(columns, mask).reshape(-1)
        found[name] = Part(masks[0], columns)
    return found


def _entries(needed: np.ndarray, each: Fraction | int, size: int) -> np.ndarray:
    """Which of `size` entries hold what is needed, where every entry holds `each` of these; one may lie across two."""
    out, (count, per) = np.zeros(size, bool), Fraction(each).as_integer_ratio()
    places = np.flatnonzero(needed)
    out[places * per // count] = True
    out[((places + 1) * per - 1) // count] = True
    return out


def _info(weight: Packed, reader: Reader) -> TensorInfo:
    stored = sum(reader.tensors[part].nbytes for part in weight.parts)
    return TensorInfo(weight.shape, weight.kind, stored)


def part(reader: Reader, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> TensorInfo:
    """The header of a stored tensor. shape: None stands for any size, or for any shape.

    Raises ValueError if it is not there, or of another dtype or shape.
    """
    info = reader.tensors.get(name)
    if info is None:
        raise ValueError(f"a quantized weight is not complete: there is no tensor {name}")
    fits = shape is None or (
        len(shape) == len(info.shape) and all(want in (None, dim) for want, dim in zip(shape, info.shape))
    )
    if info.dtype not in dtypes or not fits:
        wanted = "" if shape is None else f" {[dim if dim is not None else 'any' for dim in shape]}"
        raise ValueError(f"{name} is {info.dtype} {list(info.shape)}; expected {' or '.join(dtypes)}{wanted}")
    return info


def read_float(reader: Reader, name: str) -> np.ndarray:
    """All of a tensor as float32."""
    return whole(reader, name).astype(np.float32)


def with_suffix(reader: Reader, suffix: str) -> list[str]:
    """What stands before `suffix` in the names that end so."""
    return [name.removesuffix(suffix) for name in reader.tensors if name.endswith(suffix)]


def present(reader: Reader, names: Iterable[str]) -> tuple[str, ...]:
    """Those that are there."""
    return tuple(name for name in names if name in reader.tensors)
