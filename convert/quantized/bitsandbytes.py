"""bitsandbytes: NF4 and FP4 in blocks, and int8 with a scale for each output.

4 bits: X.weight [bytes, 1] uint8 holds the elements of [outputs, inputs] in order, the upper half of a byte first;
each is an index into X.weight.quant_map [16], to be multiplied by its block's X.weight.absmax. These are float32, or
uint8 themselves (double quantization): X.weight.nested_quant_map [256] at that place, times X.weight.nested_absmax of
its block, plus an offset. X.weight.quant_state.bitsandbytes__nf4 (or fp4) is JSON in bytes, with the shape and the
sizes of blocks.
8 bits: weight = X.weight [outputs, inputs] int8 · X.SCB [outputs] / 127.
"""

from __future__ import annotations

import math

import numpy as np

from convert.families.fields import Fields
from convert.quantized.layer import Follows, Packed, Rows, part, present, read_float, with_suffix
from convert.quantized.scaled import follows_of, low_bit, scaled_rows
from convert.shards import load_json
from convert.tensors import Reader, whole

NO_EFFECT = """
    _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold load_in_4bit
    load_in_8bit
"""
_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every projection that is stored so."""
    fields.expect("bnb_4bit_quant_storage", "uint8", None)
    four = [_four_bit(reader, name, kind) for kind in _KINDS for name in with_suffix(reader, _STATE + kind)]
    eight = [_eight_bit(reader, prefix) for prefix in with_suffix(reader, ".SCB")]
    kinds = {packed.kind.split()[0] for packed in four}
    if four and (said := fields.get("bnb_4bit_quant_type")) not in (None, *kinds):
        raise ValueError(f"{fields.where}: 'bnb_4bit_quant_type' is {said!r}, but weights are stored in {kinds}")
    return four + eight


def _four_bit(reader: Reader, name: str, kind: str) -> Packed:
    state_name = f"{name}{_STATE}{kind}"
    part(reader, state_name, ("U8",), (None,))
    state = Fields(load_json(whole(reader, state_name).tobytes(), state_name), state_name)
    state.expect("quant_type", kind)
    shape = tuple(state.get("shape") or ())
    if len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"{state_name}: 'shape' is {list(shape)}; it must be two positive integers")
    block, count = state.integer("blocksize"), math.prod(shape)
    blocks = -(-count // block)
    part(reader, name, ("U8",), (-(-count // 2), 1))
    part(reader, f"{name}.quant_map", ("F32",), (16,))
    nested = part(reader, f"{name}.absmax", ("F32", "U8"), (blocks,)).dtype == "U8"
    nested_block = state.integer("nested_blocksize") if nested else 1
    if nested:
        part(reader, f"{name}.nested_quant_map", ("F32",), (256,))
        part(reader, f"{name}.nested_absmax", ("F32",), (-(-blocks // nested_block),))
    offset = float(state.get("nested_offset", 0.0))

    def open_() -> Rows:
        levels, largest = read_float(reader, f"{name}.quant_map"), whole(reader, f"{name}.absmax")
        if nested:
            outer = read_float(reader, f"{name}.nested_absmax")[np.arange(blocks) // nested_block]
            largest = read_float(reader, f"{name}.nested_quant_map")[largest] * outer + np.float32(offset)

        def rows(start: int, stop: int) -> np.ndarray:
            first, last = start * shape[1], stop * shape[1]
            packed = reader.read(name, first // 2, -(-last // 2))[:, 0]
            codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
            values = levels[codes[first % 2 :][: last - first]]
            values *= largest[np.arange(first, last) // block]
            return values.reshape(stop - start, shape[1])

        return rows

    sides = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    parts = present(reader, (name, state_name, *(f"{name}.{side}" for side in sides)))
    follows: dict[str, Follows] = {name: (("elements", 2), None), f"{name}.absmax": (("elements", block),)}
    return Packed(name, shape, f"{kind} (bitsandbytes)", parts, open_, follows=follows)


def _eight_bit(reader: Reader, prefix: str) -> Packed:
    name, scale, layout = f"{prefix}.weight", f"{prefix}.SCB", f"{prefix}.weight_format"
    shape = part(reader, name, ("I8",), (None, None)).shape
    part(reader, scale, ("F32",), (shape[0],))
    if layout in reader.tensors and whole(reader, layout).any():
        raise ValueError(f"{layout} says that {name} is not stored row by row; save it again with a newer bitsandbytes")

    def open_() -> Rows:
        scales = read_float(reader, scale)[:, None] / np.float32(127)
        return scaled_rows(reader, name, scales, None, (1, shape[1]))

    low = low_bit(reader, name, lambda: read_float(reader, scale) / np.float32(127), (shape[0], 1))
    parts, follows = present(reader, (name, scale, layout)), follows_of(reader, name, (scale,), (1, shape[1]))
    return Packed(name, shape, "int8 (bitsandbytes)", parts, open_, low, follows)
