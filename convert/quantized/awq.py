"""AWQ, as AutoAWQ stores it: version "gemm", and "gemv", which is in `awq_gemv`.

Of a projection X with `inputs` and `outputs`: X.qweight [inputs, outputs / 8] int32, X.qzeros [groups, outputs / 8]
int32 and X.scales [groups, outputs]; weight[i, o] = scales[g, o] · (q[i, o] - zero[g, o]) for input i of group g. Of
the 8 outputs in a word the n-th 4 bits, from the lowest, are those of output 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import numpy as np

from convert.families.fields import Fields
from convert.quantized import awq_gemv
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
from convert.quantized.packing import FLOAT_SCALES, unpack_columns
from convert.tensors import Reader, whole

NO_EFFECT = """
    backend do_fuse exllama_config fuse_max_seq_len lm_head meta modules_to_fuse modules_to_not_convert true_sequential
"""
_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every projection that is stored so."""
    fields.choice("bits", fields.agreed("bits", "w_bit", default=4), {4: None})
    version = fields.agreed("version", "checkpoint_format", "format", default="gemm")
    gemv = fields.choice("version", str(version).lower(), {"gemm": False, "gemv": True})
    asymmetric = fields.boolean("zero_point", not fields.boolean("sym", False))
    if asymmetric == fields.boolean("sym", not asymmetric):
        raise ValueError(f"{fields.where}: 'zero_point' and 'sym' contradict each other: both are {asymmetric}")
    fields.expect("desc_act", False, None)
    fields.expect("pack_dtype", "int32", None)
    group_size = fields.group_size("group_size", "q_group_size")
    prefixes = with_suffix(reader, ".qweight")
    if not gemv:
        return [_packed(reader, prefix, asymmetric, group_size) for prefix in prefixes]
    if group_size is None or not asymmetric:
        raise ValueError(f"{fields.where}: version gemv is read with a 'group_size' and zero points only")
    return [awq_gemv.packed(reader, prefix, group_size) for prefix in prefixes]


def _packed(reader: Reader, prefix: str, asymmetric: bool, group_size: int | None) -> Packed:
    names = [f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales")]
    inputs, words = part(reader, names[0], ("I32",), (None, None)).shape
    groups, outputs = part(reader, names[2], FLOAT_SCALES, (None, 8 * words)).shape
    if stored := asymmetric or names[1] in reader.tensors:
        part(reader, names[1], ("I32",), (groups, words))
    if inputs % groups:
        raise ValueError(f"{names[2]} has {groups} groups, which do not divide {inputs} inputs")
    if group_size not in (None, inputs // groups) and (group_size, groups) != (-1, 1):
        raise ValueError(f"{names[2]} has {groups} groups of {inputs} inputs; 'group_size' is {group_size}")

    def read_zeros() -> np.ndarray:
        """[groups, words], as stored."""
        middle = np.full((groups, words), 0x88888888, np.uint32).view(np.int32)
        zeros = whole(reader, names[1]) if stored else middle
        if not asymmetric and not np.array_equal(zeros, middle):
            raise ValueError(f"{names[1]} holds other zero points than 8, though the config says that there are none")
        return zeros

    def open_() -> Rows:
        packed, scales = whole(reader, names[0]), read_float(reader, names[2])
        zeros = read_zeros()

        def rows(start: int, stop: int) -> np.ndarray:
            first, last = start // 8, -(-stop // 8)
            inside = slice(start - 8 * first, stop - 8 * first)
            values = _outputs(packed[:, first:last])[:, inside].astype(np.float32)
            grouped = values.reshape(groups, inputs // groups, -1)
            grouped -= _outputs(zeros[:, first:last])[:, None, inside]
            grouped *= scales[:, None, start:stop]
            return values.T

        return rows

    def open_low() -> LowRows:
        packed, scales = whole(reader, names[0]), read_float(reader, names[2]).T
        zeros = _outputs(read_zeros()).T - np.float32(8)

        def rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            first, last = start // 8, -(-stop // 8)
            values = _outputs(packed[:, first:last])[:, start - 8 * first : stop - 8 * first]
            return values.T.astype(np.int8) - np.int8(8), scales[start:stop], zeros[start:stop]

        return rows

    low_bit = LowBit("int4", inputs // groups, not asymmetric, open_low) if inputs // groups in GROUP_SIZES else None
    group: Along = ("inputs", inputs // groups)
    follows: dict[str, Follows] = {
        names[0]: (("inputs", 1), ("outputs", 8)),
        names[2]: (group, ("outputs", 1)),
    }
    if stored:
        follows[names[1]] = (group, ("outputs", 8))
    return Packed(f"{prefix}.weight", (outputs, inputs), "AWQ 4-bit", present(reader, names), open_, low_bit, follows)


def _outputs(words: np.ndarray) -> np.ndarray:
    """[rows, words] → [rows, outputs], in order."""
    values = unpack_columns(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    ordered = np.empty_like(values)
    ordered[..., _ORDER] = values
    return ordered.reshape(len(words), -1)
