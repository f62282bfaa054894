"""compressed-tensors: what llm-compressor writes.

Of a projection X with `inputs` and `outputs`, either X.weight [outputs, inputs], int8 or fp8, or X.weight_packed
[outputs, inputs · bits / 32] int32, packed along the inputs, each value plus 2 ** (bits - 1), with X.weight_shape.
X.weight_scale is [], [1], [outputs, 1], [outputs, groups] or of blocks; X.weight_zero_point is shaped alike, packed
along the outputs where the weight is packed; X.weight_g_idx [inputs] names each input's group. weight = (value - zero
point) · scale.
What is said of activations (W8A8) is not used: whether they are rounded, `LLM` is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from convert.families.fields import Fields
from convert.quantized.layer import (
    GROUP_SIZES,
    Along,
    Follows,
    LowBit,
    LowRows,
    Packed,
    Rows,
    part,
    present,
    read_float,
    with_suffix,
)
from convert.quantized.packing import FLOAT_SCALES, centred, unpack_columns, unpack_rows
from convert.quantized.scaled import block_of, follows_of, is_block, low_bit, scaled_rows, two_dimensional
from convert.tensors import Reader, whole

NO_EFFECT = "global_compression_ratio ignore kv_cache_scheme run_compressed version"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every projection that is stored so."""
    fields.choice("format", fields.get("format"), dict.fromkeys(_FORMATS))
    fields.expect("quantization_status", "compressed", "frozen")
    fields.expect("transform_config", None, {})
    sparsity = fields.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ValueError(f"{fields.where}: 'sparsity_config' is {sparsity!r}; only the format 'dense' is read")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{fields.where}: 'config_groups' is {groups!r}; it must say how weights are stored")
    schemes = [_scheme(group, f"{fields.where}, config_groups, {name}") for name, group in groups.items()]
    packed = [_integers(reader, prefix, schemes) for prefix in with_suffix(reader, ".weight_packed")]
    prefixes = [p for p in with_suffix(reader, ".weight_scale") if f"{p}.weight" in reader.tensors]
    return [*packed, *(_eight_bit(reader, prefix, schemes) for prefix in prefixes)]


@dataclass(frozen=True)
class _Scheme:
    """How the weights of one of `config_groups` are stored."""

    bits: int
    integers: bool
    strategy: str | None
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    """That zero points, if they are stored, are zeros; False: not said, or they may be others."""
    ordered: bool
    """Whether inputs are in groups that X.weight_g_idx names."""

    def scales(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """[rows, columns] of a weight's scales; None: not said."""
        outputs, inputs = shape
        if self.strategy == "block" and self.block is not None:
            return -(-outputs // self.block[0]), -(-inputs // self.block[1])
        if self.strategy == "group" and self.group_size is not None:
            return outputs, -(-inputs // self.group_size)
        return {"tensor": (1, 1), "channel": (outputs, 1)}.get(self.strategy or "")


_STRATEGIES = ("tensor", "channel", "group", "block")


def _scheme(group: Any, where: str) -> _Scheme:
    """Raises ValueError for what is not read, or says too little."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ValueError(f"{where}: 'weights' must say how weights are stored; got {group!r:.100}")
    outer = Fields(group, where)
    if outer.get("format") is not None:
        outer.choice("format", outer.get("format"), dict.fromkeys(_FORMATS))
    outer.ignore(("targets", "weights", "input_activations", "output_activations"))
    outer.finish()
    fields = Fields(group["weights"], f"{where}, weights")
    fields.choice("num_bits", bits := fields.get("num_bits"), {4: None, 8: None})
    kind = fields.choice("type", fields.get("type", "int"), {"int": True, "float": False})
    if not kind and bits == 4:
        raise ValueError(f"{fields.where}: 'num_bits' is 4 of 'type' float, which is not supported")
    strategy = fields.get("strategy")
    if strategy is not None:
        fields.choice("strategy", strategy, dict.fromkeys(_STRATEGIES))
    size, block = fields.group_size("group_size"), fields.get("block_structure")
    said = size not in (None, -1), is_block(block)
    if strategy is not None and said != (strategy == "group", strategy == "block"):
        raise ValueError(f"{fields.where}: 'strategy' is {strategy}, 'group_size' {size}, 'block_structure' {block}")
    fields.expect("dynamic", False, None)
    fields.expect("is_mx", False, None)
    order = fields.get("actorder")
    ordered = order is not None and fields.choice("actorder", order, _ORDERS)
    symmetric = fields.boolean("symmetric", False)
    fields.ignore(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))
    fields.finish()
    block = tuple(block) if strategy == "block" else None
    return _Scheme(bits, kind, strategy, size, block, symmetric, ordered)


_ORDERS = {"group": True, "dynamic": True, True: True, "weight": False, "static": False, False: False}
"""`actorder` → whether each input names its group."""


def _check_scales(stored: tuple[int, int], shape: tuple[int, ...], schemes: list[_Scheme], name: str) -> None:
    """Raises ValueError if no scheme is of such scales."""
    said = [scheme.scales(shape) for scheme in schemes]
    if None not in said and stored not in said:
        raise ValueError(f"{name} is {list(stored)}, which contradicts 'config_groups': {said}")


def _check_zeros(zeros: np.ndarray, schemes: list[_Scheme], name: str) -> np.ndarray:
    """The zero points. Raises ValueError if there are to be none."""
    if zeros.any() and all(scheme.symmetric for scheme in schemes):
        raise ValueError(f"{name} holds zero points, though 'symmetric' is true")
    return zeros


def _integers(reader: Reader, prefix: str, schemes: list[_Scheme]) -> Packed:
    names = {name: f"{prefix}.weight_{name}" for name in ("packed", "scale", "shape", "zero_point", "g_idx")}
    outputs, words = part(reader, names["packed"], ("I32",), (None, None)).shape
    part(reader, names["shape"], ("I64", "I32"), (2,))
    shape = tuple(int(size) for size in whole(reader, names["shape"]))
    allowed = {scheme.bits for scheme in schemes if scheme.integers}
    fitting = [bits for bits in allowed if shape[0] == outputs and words == -(-shape[1] * bits // 32)]
    if len(fitting) != 1:
        raise ValueError(
            f"{names['packed']} is [{outputs}, {words}], which is no {list(shape)} of {sorted(allowed)} bits; "
            f"{names['shape']} or num_bits is wrong"
        )
    (bits,), inputs = fitting, shape[1]
    _, groups = part(reader, names["scale"], FLOAT_SCALES, (outputs, None)).shape
    schemes = [scheme for scheme in schemes if scheme.bits == bits]
    _check_scales((outputs, groups), shape, schemes, names["scale"])
    zero_words = -(-outputs * bits // 32)
    if asymmetric := names["zero_point"] in reader.tensors:
        part(reader, names["zero_point"], ("I32",), (zero_words, groups))
    if mixed := names["g_idx"] in reader.tensors or all(scheme.ordered for scheme in schemes):
        part(reader, names["g_idx"], ("I32", "I64"), (inputs,))
    elif inputs % groups:
        raise ValueError(f"{names['scale']} has {groups} groups, which do not divide {inputs} inputs")

    def read_zeros() -> np.ndarray:
        """[outputs, groups] float32."""
        if not asymmetric:
            return np.zeros((outputs, groups), np.float32)
        zeros = unpack_rows(whole(reader, names["zero_point"]), bits, outputs).astype(np.float32) - middle
        return _check_zeros(zeros, schemes, names["zero_point"])

    middle = np.float32(1 << (bits - 1))

    def open_() -> Rows:
        scales, zeros = read_float(reader, names["scale"]), read_zeros() + middle
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
        scales, zeros = read_float(reader, names["scale"]), read_zeros()

        def rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            values = centred(unpack_columns(reader.read(names["packed"], start, stop), bits, inputs), bits)
            return values, scales[start:stop], zeros[start:stop]

        return rows

    parts = present(reader, names.values())
    kind, group, low = f"int{bits} (compressed-tensors)", inputs // groups, None
    if bits == 4 and group in GROUP_SIZES and not mixed:
        low = LowBit("int4", group, not asymmetric, open_low)
    elif bits == 8 and groups == 1 and not asymmetric and not mixed:
        low = LowBit("int8", None, True, open_low)
    packed, each = Fraction(32, bits), _along_groups(mixed, group)
    follows: dict[str, Follows] = {
        names["packed"]: (("outputs", 1), ("inputs", packed)),
        names["scale"]: (("outputs", 1), each),
    }
    if asymmetric:
        follows[names["zero_point"]] = (("outputs", packed), each)
    if mixed:
        follows[names["g_idx"]] = (("inputs", 1),)
    return Packed(f"{prefix}.weight", (outputs, inputs), kind, parts, open_, low, follows)


def _along_groups(mixed: bool, group: int) -> Along | None:
    return None if mixed else ("inputs", group)


def _eight_bit(reader: Reader, prefix: str, schemes: list[_Scheme]) -> Packed:
    name, scale, zero = f"{prefix}.weight", f"{prefix}.weight_scale", f"{prefix}.weight_zero_point"
    info = part(reader, name, ("I8", "F8_E4M3"), (None, None))
    size = two_dimensional(part(reader, scale, FLOAT_SCALES).shape)
    fitting = [s for s in schemes if s.bits == 8 and s.integers == (info.dtype == "I8")]
    if not fitting:
        raise ValueError(f"{name} is {info.dtype}, which contradicts 'config_groups'")
    _check_scales(size, info.shape, fitting, scale)
    blocks = [scheme.block for scheme in fitting if scheme.block is not None and scheme.scales(info.shape) == size]
    block = blocks[0] if blocks else block_of(info.shape, size, scale)
    if asymmetric := zero in reader.tensors:
        part(reader, zero, ("I8", "F8_E4M3"), reader.tensors[scale].shape)

    def open_() -> Rows:
        zeros = _check_zeros(read_float(reader, zero), fitting, zero).reshape(size) if asymmetric else None
        return scaled_rows(reader, name, read_float(reader, scale).reshape(size), zeros, block)

    kind = "int8 (compressed-tensors)" if info.dtype == "I8" else "fp8 (compressed-tensors)"
    low = low_bit(reader, name, lambda: read_float(reader, scale), size)
    parts, follows = present(reader, (name, scale, zero)), follows_of(reader, name, (scale, zero), block)
    return Packed(name, info.shape, kind, parts, open_, None if asymmetric else low, follows)
