"""GPTQ, as AutoGPTQ and GPTQModel store it.

Of a projection X with `inputs` and `outputs`: X.qweight [inputs · bits / 32, outputs] int32, packed along the inputs;
X.qzeros [groups, outputs · bits / 32] int32, packed along the outputs; X.scales [groups, outputs]; X.g_idx [inputs]
int32, the group of each input (`desc_act` mixes them). weight[i, o] = scales[g_idx[i], o] · (q[i, o] - zero[g_idx[i],
o]).
Version 1 stores each zero point minus 1.
"""

from __future__ import annotations

import math

import numpy as np

from convert.families.fields import Fields
from convert.quantized.layer import GROUP_SIZES, LowBit, LowRows, Packed, Rows, part, present, read_float, with_suffix
from convert.quantized.packing import FLOAT_SCALES, unpack_rows
from convert.tensors import Reader, whole

_BITS = (2, 3, 4, 8)
_ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every projection that is stored so."""
    bits = fields.integer("bits")
    if bits not in _BITS:
        raise ValueError(f"{fields.where}: 'bits' is {bits}, which is not supported; supported: {str(_BITS)[1:-1]}")
    offset = fields.choice("checkpoint_format", fields.get("checkpoint_format", "gptq"), _ZERO_OFFSET)
    fields.expect("is_marlin_format", False)
    fields.expect("dynamic", None, {})
    fields.expect("pack_dtype", "int32")
    return [_packed(reader, prefix, bits, offset) for prefix in with_suffix(reader, ".qweight")]


def _packed(reader: Reader, prefix: str, bits: int, offset: int) -> Packed:
    names = {name: f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")}
    words, outputs = part(reader, names["qweight"], ("I32",), (None, None)).shape
    inputs = words * 32 // bits
    groups, _ = part(reader, names["scales"], FLOAT_SCALES, (None, outputs)).shape
    part(reader, names["qzeros"], ("I32",), (groups, math.ceil(outputs * bits / 32)))
    if grouped := names["g_idx"] in reader.tensors:
        part(reader, names["g_idx"], ("I32",), (inputs,))
    elif inputs % groups:
        raise ValueError(f"{names['scales']} has {groups} groups, which do not divide {inputs} inputs")

    def open_() -> Rows:
        packed, scales = whole(reader, names["qweight"]), read_float(reader, names["scales"])
        zeros = unpack_rows(whole(reader, names["qzeros"]).T, bits, outputs).T.astype(np.float32) + offset
        group = whole(reader, names["g_idx"]) if grouped else np.arange(inputs) // (inputs // groups)
        if group.min() < 0 or group.max() >= groups:
            raise ValueError(f"{names['g_idx']} names groups beyond the {groups} that there are")

        def rows(start: int, stop: int) -> np.ndarray:
            values = unpack_rows(packed[:, start:stop], bits, inputs).T.astype(np.float32)
            values -= zeros[:, start:stop].T[:, group]
            values *= scales[:, start:stop].T[:, group]
            return values

        return rows

    kind, group = f"GPTQ {bits}-bit", inputs // groups
    in_order = not grouped or np.array_equal(whole(reader, names["g_idx"]), np.arange(inputs) // group)
    low_bit = _low_bit(reader, names, outputs, group, offset) if bits == 4 and in_order else None
    return Packed(f"{prefix}.weight", (outputs, inputs), kind, present(reader, names.values()), open_, low_bit)


def _low_bit(reader: Reader, names: dict[str, str], outputs: int, group: int, offset: int) -> LowBit | None:
    """Of 4 bits, with groups of neighbours."""
    if group not in GROUP_SIZES:
        return None
    zeros = unpack_rows(whole(reader, names["qzeros"]).T, 4, outputs).astype(np.float32) + (offset - 8)

    def open_() -> LowRows:
        packed, scales = whole(reader, names["qweight"]), read_float(reader, names["scales"]).T

        def rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            values = unpack_rows(packed[:, start:stop], 4, 8 * len(packed)).T.astype(np.int8) - np.int8(8)
            return values, scales[start:stop], zeros[start:stop]

        return rows

    return LowBit("int4", group, not zeros.any(), open_)
