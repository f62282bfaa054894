"""GPTQ, as AutoGPTQ and GPTQModel store it.

Of a projection X with `inputs` and `outputs`: X.qweight [inputs · bits / 32, outputs] int32, packed along the inputs;
X.qzeros [groups, outputs · bits / 32] int32, packed along the outputs; X.scales [groups, outputs]; X.g_idx [inputs]
int32, the group of each input (`desc_act` mixes them). weight[i, o] = scales[g_idx[i], o] · (q[i, o] - zero[g_idx[i],
o]).
Version 1 stores each zero point minus 1; of words, since a zero point of 0 then borrows from its neighbour. With `sym`
all are 2 ** (bits - 1), by whichever version they are stored, which some files do not say rightly.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

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
from convert.quantized.packing import FLOAT_SCALES, centred, unpack_rows
from convert.tensors import Reader, whole

_BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
NO_EFFECT = """
    act_group_aware auto_forward_data_parallelism backend batch_size block_name_to_quantize cache_block_outputs
    compute_device_filter damp_auto_increment damp_percent dataset dense_vram_strategy desc_act device disable_exllama
    exllama_config fallback failsafe foem gptaq group_size lm_head max_input_length meta mock_quantization
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    mse offload_to_disk offload_to_disk_path pack_impl pad_token_id parallel_packing process smooth static_groups
    tokenizer true_sequential uri use_cuda_fp16 use_exllama v2 v2_alpha v2_memory_device vram_strategy
    wait_for_submodule_finalizers
"""
"""Fields that say how it was made, which kernel to run, or what the tensors say as well."""


@dataclass(frozen=True)
class _Stored:
    """How all of a checkpoint's projections are stored."""

    bits: int
    version: int
    symmetric: bool
    ordered: bool
    """Whether X.g_idx must be there."""
    group_size: int | None
    """-1: all inputs; None: as the shapes of scales say."""


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every projection that is stored so."""
    bits = fields.integer("bits")
    if bits not in _BITS:
        raise ValueError(f"{fields.where}: 'bits' is {bits}, which is not supported; supported: {str(_BITS)[1:-1]}")
    version = fields.choice(
        "checkpoint_format", fields.agreed("checkpoint_format", "format", default="gptq"), _VERSIONS
    )
    symmetric = fields.boolean("sym", False)
    fields.expect("is_marlin_format", False, None)
    fields.expect("pack_dtype", "int32", None)
    _check_dynamic(fields)
    meta = fields.get("meta")
    makers = str(meta.get("quantizer") if isinstance(meta, dict) else None)
    if bits == 3 and version == 1 and not symmetric and "gptqmodel" in makers:
        raise ValueError(
            f"{fields.where}: versions of GPTQModel stored zero points of 3 bits in two ways, both called 'gptq'; save "
            "the checkpoint again in its format 'gptq_v2'"
        )
    stored = _Stored(bits, version, symmetric, fields.boolean("desc_act", False), fields.group_size("group_size"))
    return [_packed(reader, prefix, stored) for prefix in with_suffix(reader, ".qweight")]


def _check_dynamic(fields: Fields) -> None:
    """`-:pattern` is about layers that are not quantized, which their tensors say as well. Raises ValueError for
    others.
    """
    dynamic = fields.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(own for name, own in dynamic.items() if not name.startswith("-:")):
        raise ValueError(
            f"{fields.where}: 'dynamic' is {dynamic!r:.100}; layers that are quantized otherwise than the "
            "rest are not read"
        )


def _packed(reader: Reader, prefix: str, how: _Stored) -> Packed:
    names = {name: f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")}
    words, outputs = part(reader, names["qweight"], ("I32",), (None, None)).shape
    inputs = words * 32 // how.bits
    groups, _ = part(reader, names["scales"], FLOAT_SCALES, (None, outputs)).shape
    part(reader, names["qzeros"], ("I32",), (groups, math.ceil(outputs * how.bits / 32)))
    if grouped := how.ordered or names["g_idx"] in reader.tensors:
        part(reader, names["g_idx"], ("I32",), (inputs,))
    elif how.group_size is None and inputs % groups:
        raise ValueError(f"{names['scales']} has {groups} groups, which do not divide {inputs} inputs")
    size = inputs if how.group_size == -1 else how.group_size or -(-inputs // groups)
    if groups != -(-inputs // size):
        raise ValueError(f"{names['scales']} has {groups} groups of {inputs} inputs; 'group_size' is {size}")
    in_order = np.arange(inputs) // size
    middle = 1 << (how.bits - 1)
    read_zeros = functools.partial(_zeros, reader, names["qzeros"], how, outputs)

    def open_() -> Rows:
        packed, scales = whole(reader, names["qweight"]), read_float(reader, names["scales"])
        zeros = read_zeros().astype(np.float32)
        group = whole(reader, names["g_idx"]) if grouped else in_order
        if group.min() < 0 or group.max() >= groups:
            raise ValueError(f"{names['g_idx']} names groups beyond the {groups} that there are")

        def rows(start: int, stop: int) -> np.ndarray:
            values = unpack_rows(packed[:, start:stop], how.bits, inputs).T.astype(np.float32)
            values -= zeros[:, start:stop].T[:, group]
            values *= scales[:, start:stop].T[:, group]
            return values

        return rows

    def open_low() -> LowRows:
        packed, scales = whole(reader, names["qweight"]), read_float(reader, names["scales"]).T
        zeros = read_zeros().T.astype(np.float32) - middle

        def rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            values = centred(unpack_rows(packed[:, start:stop], how.bits, inputs).T, how.bits)
            return values, scales[start:stop], zeros[start:stop]

        return rows

    low_bit, neighbours = None, not grouped or np.array_equal(whole(reader, names["g_idx"]), in_order)
    if how.bits == 4 and size in GROUP_SIZES and not inputs % size and neighbours:
        low_bit = LowBit("int4", size, how.symmetric or bool((read_zeros() == middle).all()), open_low)
    elif how.bits == 8 and groups == 1 and neighbours and bool((read_zeros() == middle).all()):
        low_bit = LowBit("int8", None, True, open_low)
    parts, packed = present(reader, names.values()), Fraction(32, how.bits)
    group: Along | None = ("inputs", size) if neighbours else None
    follows: dict[str, Follows] = {
        names["qweight"]: (("inputs", packed), ("outputs", 1)),
        names["scales"]: (group, ("outputs", 1)),
        names["qzeros"]: (group, ("outputs", packed)),
    }
    if grouped:
        follows[names["g_idx"]] = (("inputs", 1),)
    return Packed(f"{prefix}.weight", (outputs, inputs), f"GPTQ {how.bits}-bit", parts, open_, low_bit, follows)


def _zeros(reader: Reader, name: str, how: _Stored, outputs: int) -> np.ndarray:
    """[groups, outputs] uint8. Raises ValueError if they are not what `sym` says."""
    words = np.ascontiguousarray(whole(reader, name).T).view(np.uint32)
    if not how.symmetric:
        return _unpacked(words, how.bits, how.version, outputs).T
    middle = np.full((outputs, words.shape[1]), 1 << (how.bits - 1), np.uint8)
    stored = (_unpacked(words, how.bits, version, outputs) for version in (1, 2))
    if how.bits != 3 and not any(np.array_equal(zeros, middle) for zeros in stored):  # GPTQModel has its own of 3
        raise ValueError(f"{name} holds other zero points than {middle[0, 0]}, though 'sym' is true")
    return middle.T


def _unpacked(words: np.ndarray, bits: int, version: int, outputs: int) -> np.ndarray:
    """[words, groups] uint32 → [outputs, groups] uint8."""
    largest = (1 << bits) - 1
    if version == 1 and 32 % bits == 0:
        words = words + np.uint32(0xFFFFFFFF // largest)  # 1 in every place
    values = unpack_rows(words, bits, outputs)
    return (values + 1) & largest if version == 1 and 32 % bits else values
