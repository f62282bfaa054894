"""A stored [outputs, inputs] of 8-bit numbers, and scales for all of it, for each output, for groups or for blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from convert.quantized.layer import Follows, LowBit, LowRows, Rows
from convert.tensors import Reader


def scaled_rows(
    reader: Reader, name: str, scales: np.ndarray, zeros: np.ndarray | None, block: tuple[int, int]
) -> Rows:
    """weight = (stored - zero) · scale.

    scales, zeros: [⌈outputs / block[0]⌉, ⌈inputs / block[1]⌉] float32; `block` is what one scale is for.
    """
    inputs = reader.tensors[name].shape[1]

    def rows(start: int, stop: int) -> np.ndarray:
        values = reader.read(name, start, stop).astype(np.float32)
        row, column = np.arange(start, stop) // block[0], np.arange(inputs) // block[1]
        if zeros is not None:
            values -= zeros[row][:, column]
        values *= scales[row][:, column] if scales.shape[1] > 1 else scales[row]
        return values

    return rows


def low_bit(reader: Reader, name: str, scales: Callable[[], np.ndarray], size: tuple[int, int]) -> LowBit | None:
    """How to keep what has one scale, or one for each output, and no zeros; None if it has more.

    scales: reads them, flat; size: [rows, columns] of them.
    """
    info = reader.tensors[name]
    if size not in ((1, 1), (info.shape[0], 1)):
        return None

    def open_() -> LowRows:
        each = np.broadcast_to(scales().reshape(size), (info.shape[0], 1))
        return lambda start, stop: (reader.read(name, start, stop), each[start:stop], None)

    return LowBit("int8" if info.dtype == "I8" else "fp8", None, True, open_)


def follows_of(reader: Reader, name: str, scales: Iterable[str], block: tuple[int, int]) -> dict[str, Follows]:
    """How the stored numbers, and those of `scales` that are there, go along with the weight."""
    along: Follows = (("outputs", block[0]), ("inputs", block[1]))
    each: dict[str, Follows] = {name: (("outputs", 1), ("inputs", 1))}
    shapes = {scale: reader.tensors[scale].shape for scale in scales if scale in reader.tensors}
    return each | {scale: along[: len(shape)] for scale, shape in shapes.items() if shape}


def block_of(shape: tuple[int, ...], scales: tuple[int, ...], where: str) -> tuple[int, int]:
    """(outputs, inputs) that a scale is for, where these are not said: one of all, an output's, or a group's.

    shape: of the weight; scales: of its scales, 2-D. Raises ValueError for scales that fit neither.
    """
    outputs, inputs = shape
    if scales == (1, 1):
        return outputs, inputs
    if scales[0] == outputs and scales[1] > 0 and inputs % scales[1] == 0:
        return 1, inputs // scales[1]
    raise ValueError(f"{where} is {list(scales)}, which does not fit a weight of {list(shape)}")


def two_dimensional(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of scales: [] and [1] are one for all, [outputs] one for each output."""
    size = [*shape, 1, 1][:2]
    return size[0], size[1]


def is_block(size: Any) -> bool:
    """Whether it is [rows, columns], as a config says it."""
    return isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
