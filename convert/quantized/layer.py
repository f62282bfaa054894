"""A weight that is stored as several tensors, presented as the one that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from convert.tensors import Reader, TensorInfo, whole
from jaxinfer.config import WeightFormat

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


class DequantizingReader:
    """The tensors of `reader`, with packed weights in place of their parts."""

    def __init__(self, reader: Reader, packed: Iterable[Packed], hidden: Iterable[str] = ()):
        """hidden: tensors that are not presented."""
        self._reader = reader
        self._packed = {weight.name: weight for weight in packed}
        parts = set(hidden) | {part for weight in self._packed.values() for part in weight.parts}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in reader.tensors.items() if name not in parts
        } | {name: _info(weight, reader) for name, weight in self._packed.items()}
        self._opened: tuple[str, Rows] | None = None

    def low_bit(self, name: str) -> LowBit | None:
        """How a weight may be kept as it is; None: only as floats."""
        return self._packed[name].low_bit if name in self._packed else None

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): float32 if packed, else as stored. What a packed weight's rows share is read once and
        kept until another weight is read.
        """
        if name not in self._packed:
            self._opened = None
            return self._reader.read(name, start, stop)
        if self._opened is None or self._opened[0] != name:
            self._opened = None  # the last one goes before the next comes
            self._opened = name, self._packed[name].open()
        return self._opened[1](start, stop)


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
