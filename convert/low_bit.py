"""Weights that others quantized as our own formats hold them: fused and laid out, and never made floats."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convert import slices
from convert.families.table import Source
from convert.joined import Joined, Stacked
from convert.quantized.layer import DequantizingReader, LowBit
from convert.tensors import Reader, TensorInfo, has_nan
from convert.transforms import Slot, Transform
from jaxinfer.config import ModelConfig, Quantization, WeightFormat
from jaxinfer.parameters import Parameter, declare, flatten

logger = logging.getLogger(__name__)


def stored_quantization(config: ModelConfig, sources: Mapping[str, Source], reader: Reader) -> Quantization | None:
    """What all projections are stored as, if that is one format of ours; None: they are to be read as floats.

    The head and the experts may be left out.
    """
    if not isinstance(reader, DequantizingReader):
        return None
    found: dict[str, list[LowBit | None]] = {"layers": [], "experts": [], "head": []}
    for path, parameter in flatten(declare(config)):
        if not parameter.contract:
            continue
        part = "head" if "vocab" in parameter.axes else "experts" if parameter.batch else "layers"
        stored = low_bits(sources[path], reader)
        layouts = {(low.group_size, config, low.inputs_first) for low in stored}
        fits = stored and all(fusible(parameter, sources[path].transform, *layout) for layout in layouts)
        found[part] += stored if fits else [None]
        if not fits:
            logger.info("%s is stored in no format of ours", path)
    kinds = {part: _kind(each) for part, each in found.items()}
    kind = kinds["experts"] or kinds["layers"]  # of most bytes
    if kind is None:
        return None
    head, experts, layers = (not found[part] or kinds[part] == kind for part in ("head", "experts", "layers"))
    kept = (found["experts"] if experts else []) + (found["layers"] if layers else [])
    symmetric = all(low.symmetric for low in kept if low is not None)
    return Quantization(*kind, symmetric, head or kind[0] in ("int4", "mxfp4"), experts, layers)


def described(kept: Quantization | None, config: ModelConfig) -> str:
    """What becomes of the projections, for people."""
    if kept is None:
        return "the projections are read as floats"
    if not kept.layers:
        return f"the projections of experts are kept in {kept.format}, the others are read as floats"
    others = "" if kept.experts or not config.num_experts else ", those of experts read as floats"
    return f"the projections are kept in {kept.format}{others}"


def _kind(stored: list[LowBit | None]) -> tuple[WeightFormat, int | None] | None:
    """The format and group size of all of them; None if they differ, or are to be read as floats."""
    kinds = {None if low is None else (low.format, low.group_size if low.format == "int4" else None) for low in stored}
    return kinds.pop() if len(kinds) == 1 else None


def low_bits(source: Source, reader: Reader) -> list[LowBit]:
    """Of all the source tensors, or none if one of them is only to be had as floats."""
    if not isinstance(reader, DequantizingReader):
        return []
    found = [reader.low_bit(name) for name in source.names]
    return [low for low in found if low is not None] if None not in found else []


def read_parts(
    parameter: Parameter,
    source: Source,
    reader: DequantizingReader,
    config: ModelConfig,
    leaf: Any,
    block_rows: int,
    wanted: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """values, scales and, if `leaf` has them, zeros of one projection as a QuantizedArray stores them, int4 unpacked.

    leaf: an abstract QuantizedArray, for its format and dtypes. block_rows: rows of a source that are read at a time.
    wanted: which elements, as `convert.slices.needed` says it; what belongs to others only is undefined.
    """
    *outputs, inputs = parameter.stored_shape
    groups = inputs // leaf.group_size if leaf.group_size else 1
    dtype = np.dtype(np.int8) if leaf.format == "int4" else leaf.values.dtype
    parts = {"values": np.empty((*outputs, inputs // 2 if leaf.format == "mxfp4" else inputs), dtype)}
    parts["scales"] = np.empty((*outputs, groups), leaf.scales.dtype)
    if leaf.zeros is not None:
        parts["zeros"] = np.empty((*outputs, groups), leaf.zeros.dtype)
    slots = {name: source.transform(canonical(part, parameter), config) for name, part in parts.items()}
    lows = low_bits(source, reader)
    needed = [None] * len(lows) if wanted is None else slices.parts(source, wanted, parameter, config)
    for position, (name, low, of_it) in enumerate(zip(source.names, lows, needed, strict=True)):
        reader.narrow(name, of_it)
        rows, info, group = low.open(), reader.tensors[name], slots["values"][position].group
        for start, stop in _ranges(info, max(1, block_rows // group) * group):
            if of_it is not None and not of_it.rows[start:stop].any():
                continue
            values, scales, zeros = rows(start, stop)
            if (scales == 255).any() if leaf.format == "mxfp4" else has_nan(np.ascontiguousarray(scales)):
                logger.warning("%s holds NaN; every result that it touches will be NaN", name)
            slots["values"][position].write(start, values)
            slots["scales"][position].write(start, scales)
            if "zeros" in parts:
                slots["zeros"][position].write(start, np.zeros_like(scales) if zeros is None else zeros)
    return parts if leaf.group_size else {**parts, "scales": parts["scales"][..., 0]}


def _ranges(info: TensorInfo, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, info.shape[0], step):
        yield start, min(start + step, info.shape[0])


def canonical(stored: np.ndarray, parameter: Parameter) -> np.ndarray:
    """[*batch, *outputs, columns] as [*batch, *inputs, *outputs]: columns that are fewer than the inputs become the
    last of these.
    """
    first, last = parameter.batch, parameter.batch + parameter.contract
    dims = parameter.shape[first:last]
    if stored.shape[-1] != parameter.inputs:
        dims = (*(1 for _ in dims[1:]), stored.shape[-1])
    split = stored.reshape(*stored.shape[:-1], *dims)
    return np.moveaxis(split, range(stored.ndim - 1, split.ndim), range(first, last))


def fusible(
    parameter: Parameter, transform: Transform, group_size: int | None, config: ModelConfig, inputs_first: bool = False
) -> bool:
    """Whether the source tensors have our inputs as their columns, in order, and their scales are fused alike.

    inputs_first: as the rows of each expert, instead.
    """
    if group_size is not None and parameter.inputs % group_size:
        return False
    shape = parameter.stored_shape
    # Only shapes and strides are looked at: this array has no memory of its own.
    phantom = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), shape, _row_major(shape))
    scales = np.broadcast_to(np.int8(0), (*shape[:-1], parameter.inputs // group_size if group_size else 1))
    try:
        values = transform(canonical(phantom, parameter), config)
        fused = transform(canonical(scales, parameter), config)
    except ValueError:
        return False
    rows = [slot.shape[0] for slot in values] == [slot.shape[0] for slot in fused]
    return rows and all(map(_by_input if inputs_first else _in_order, values))


def _by_input(slot: Slot) -> bool:
    if not isinstance(slot, Stacked):
        return False
    each = [(part.view.shape[: part.rows], part.view.strides[: part.rows]) for part in slot.parts]
    return all(list(strides) == _row_major(shape) for shape, strides in each)


def _in_order(slot: Slot) -> bool:
    if isinstance(slot, Stacked):
        return False
    if isinstance(slot, Joined):
        return slot.axis == 0 and all(map(_in_order, slot.parts))
    columns, strides = slot.view.shape[slot.rows :], slot.view.strides[slot.rows :]
    return bool(columns) and list(strides) == _row_major(columns)


def _row_major(shape: tuple[int, ...]) -> list[int]:
    """Strides, in elements."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
