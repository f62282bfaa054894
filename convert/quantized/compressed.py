"""compressed-tensors: what llm-compressor writes.

Of a projection X with `inputs` and `outputs`, either X.weight [outputs, inputs], int8 or fp8, or X.weight_packed
[outputs, inputs · bits / 32] int32, packed along the inputs, each value plus 2 ** (bits - 1), with X.weight_shape.
X.weight_scale is [], [1], [outputs, 1], [outputs, groups] or of blocks; X.weight_zero_point is shaped alike, packed
along the outputs where the weight is packed; X.weight_g_idx [inputs] names each input's group. weight = (value - zero
point) · scale.
What is said of activations (W8A8) is not used: they are not rounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.families.fields import Fields
from convert.quantized.layer import GROUP_SIZES, LowBit, LowRows, Packed, Rows, part, present, read_float, with_suffix
from convert.quantized.packing import FLOAT_SCALES, unpack_columns, unpack_rows
from convert.quantized.scaled import block_of, low_bit, scaled_rows, two_dimensional
from convert.tensors import Reader, whole

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every projection that is stored so."""
    fields.choice("format", fields.get("format"), dict.fromkeys(_FORMATS))
    fields.expect("quantization_status", "compressed", "frozen")
    fields.expect("transform_config", None, {})
    sparsity = fields.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"{fields.where}: 'sparsity_config' has the format {sparsity['format']!r}; only dense is read")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{fields.where}: 'config_groups' is {groups!r}; it must say how weights are stored")
    schemes = [_weights(group, fields.where) for group in groups.values()]
    bits = {scheme["num_bits"] for scheme in schemes}
    packed = [_integers(reader, prefix, bits) for prefix in with_suffix(reader, ".weight_packed")]
    blocks = {tuple(s["block_structure"]) for s in schemes if s.get("strategy") == "block"}
    prefixes = [p for p in with_suffix(reader, ".weight_scale") if f"{p}.weight" in reader.tensors]
    return [*packed, *(_eight_bit(reader, prefix, blocks) for prefix in prefixes)]


def _weights(group: Any, where: str) -> Mapping[str, Any]:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("num_bits") not in (4, 8):
        raise ValueError(f"{where}: a group of 'config_groups' has weights {weights!r}; 4 and 8 bits are read")
    return weights


def _integers(reader: Reader, prefix: str, allowed: set[int]) -> Packed:
    names = {name: f"{prefix}.weight_{name}" for name in ("packed", "scale", "shape", "zero_point", "g_idx")}
    outputs, words = part(reader, names["packed"], ("I32",), (None, None)).shape
    part(reader, names["shape"], ("I64", "I32"), (2,))
    shape = tuple(int(size) for size in whole(reader, names["shape"]))
    fitting = [bits for bits in allowed if shape[0] == outputs and words == -(-shape[1] * bits // 32)]
    if len(fitting) != 1:
        raise ValueError(
            f"{names['packed']} is [{outputs}, {words}], which is no {list(shape)} of {sorted(allowed)} bits; "
            f"{names['shape']} or num_bits is wrong"
        )
    (bits,), inputs = fitting, shape[1]
    _, groups = part(reader, names["scale"], FLOAT_SCALES, (outputs, None)).shape
    zero_words = -(-outputs * bits // 32)
    if asymmetric := names["zero_point"] in reader.tensors:
        part(reader, names["zero_point"], ("I32",), (zero_words, groups))
    if mixed := names["g_idx"] in reader.tensors:
        part(reader, names["g_idx"], ("I32", "I64"), (inputs,))
    elif inputs % groups:
        raise ValueError(f"{names['scale']} has {groups} groups, which do not divide {inputs} inputs")

    def open_() -> Rows:
        scales = read_float(reader, names["scale"])
        middle = float(1 << (bits - 1))
        zeros = np.full((outputs, groups), middle, np.float32)
        if asymmetric:
            zeros = unpack_rows(whole(reader, names["zero_point"]), bits, outputs).astype(np.float32)
        group = whole(reader, names["g_idx"]) if mixed else np.arange(inputs) // (inputs // groups)
        if group.min() < 0 or group.max() >= groups:
            raise ValueError(f"{names['g_idx']} names groups beyond the {groups} that there are")

        def rows(start: int, stop: int) -> np.ndarray:
            words = reader.read(names["packed"], start, stop)
            values = unpack_columns(words, bits, inputs).astype(np.float32)
            values -= zeros[start:stop][:, group]
            values *= scales[start:stop][:, group]
            return values

        return rows

    def open_low() -> LowRows:
        scales, zeros = read_float(reader, names["scale"]), np.zeros((outputs, groups), np.float32)
        if asymmetric:
            zeros = unpack_rows(whole(reader, names["zero_point"]), 4, outputs).astype(np.float32) - 8

        def rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            values = unpack_columns(reader.read(names["packed"], start, stop), 4, inputs).astype(np.int8) - np.int8(8)
            return values, scales[start:stop], zeros[start:stop]

        return rows

    parts = present(reader, names.values())
    kind, group, low = f"int{bits} (compressed-tensors)", inputs // groups, None
    if bits == 4 and group in GROUP_SIZES and not mixed:
        low = LowBit("int4", group, not asymmetric, open_low)
    return Packed(f"{prefix}.weight", (outputs, inputs), kind, parts, open_, low)


def _eight_bit(reader: Reader, prefix: str, blocks: set[tuple[int, int]]) -> Packed:
    name, scale, zero = f"{prefix}.weight", f"{prefix}.weight_scale", f"{prefix}.weight_zero_point"
    info = part(reader, name, ("I8", "F8_E4M3"), (None, None))
    size = two_dimensional(part(reader, scale, FLOAT_SCALES).shape)
    outputs, inputs = info.shape
    fitting = [block for block in blocks if size == (-(-outputs // block[0]), -(-inputs // block[1]))]
    block = fitting[0] if fitting else block_of(info.shape, size, scale)
    if asymmetric := zero in reader.tensors:
        part(reader, zero, ("I8", "F8_E4M3"), reader.tensors[scale].shape)

    def open_() -> Rows:
        zeros = read_float(reader, zero).reshape(size) if asymmetric else None
        return scaled_rows(reader, name, read_float(reader, scale).reshape(size), zeros, block)

    kind = "int8 (compressed-tensors)" if info.dtype == "I8" else "fp8 (compressed-tensors)"
    low = low_bit(reader, name, lambda: read_float(reader, scale), size)
    return Packed(name, info.shape, kind, present(reader, (name, scale, zero)), open_, None if asymmetric else low)
