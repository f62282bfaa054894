"""MXFP4 (OCP Microscaling 1.0), as gpt-oss stores its experts.

X_blocks [experts, outputs, inputs / 32, 16] uint8 holds 32 values of 4 bits (E2M1), the lower half of a byte first;
X_scales [experts, outputs, inputs / 32] uint8 the exponent of 2, plus 127, that they are multiplied by. The weight is
X [experts, inputs, outputs], the order in which the same model is stored unquantized. It is kept in 4 bits.
"""

from __future__ import annotations

import numpy as np

from convert.families.fields import Fields
from convert.quantized.layer import Follows, LowBit, LowRows, Packed, Rows, part, with_suffix
from convert.tensors import Reader

NO_EFFECT = "dequantize modules_to_not_convert"
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""Of the 16 codes."""


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every weight that is stored so."""
    return [_packed(reader, prefix) for prefix in with_suffix(reader, "_blocks")]


def _packed(reader: Reader, name: str) -> Packed:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    experts, outputs, groups, _ = part(reader, blocks, ("U8",), (None, None, None, 16)).shape
    part(reader, scales, ("U8",), (experts, outputs, groups))

    def codes(start: int, stop: int) -> np.ndarray:
        """[experts, outputs, groups, 32]"""
        packed = reader.read(blocks, start, stop)
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 32)

    def rows(start: int, stop: int) -> np.ndarray:
        values = VALUES[codes(start, stop)]
        exponents = reader.read(scales, start, stop).astype(np.int32) - 127
        with np.errstate(over="ignore"):  # 6 · 2 ** 126 is infinite in float32
            values = np.ldexp(values, exponents[..., None])
        values[exponents == 128] = np.nan
        return values.reshape(stop - start, outputs, 32 * groups).swapaxes(1, 2)

    def open_() -> Rows:
        return rows

    def low_rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, None]:
        values = repacked(reader.read(blocks, start, stop)).reshape(stop - start, outputs, 16 * groups)
        return values.swapaxes(1, 2), reader.read(scales, start, stop).swapaxes(1, 2), None

    def open_low() -> LowRows:
        return low_rows

    low_bit = LowBit("mxfp4", 32, True, open_low, inputs_first=True)
    along: Follows = (("experts", 1), ("outputs", 1), ("inputs", 32))
    follows: dict[str, Follows] = {blocks: (*along, None), scales: along}
    return Packed(name, (experts, 32 * groups, outputs), "MXFP4", (blocks, scales), open_, low_bit, follows)


def repacked(blocks: np.ndarray) -> np.ndarray:
    """[..., 16] uint8, the bytes of 32 codes, in the order of `pallas_kernels.formats.pack_int4`.

    There input 16 s + 8 h + 2 c + e is in byte 4 c + 2 e + s, the upper half if h is 1; here in byte 8 s + 4 h + c, the
    upper half if e is 1.
    """
    split = blocks.reshape(*blocks.shape[:-1], 2, 2, 4)  # s, h, c
    first, second = split[..., 0, :], split[..., 1, :]
    out = np.empty((*blocks.shape[:-1], 4, 2, 2), np.uint8)  # c, e, s
    out[..., 0, :] = np.swapaxes(first & 15 | second << 4, -1, -2)
    out[..., 1, :] = np.swapaxes(first >> 4 | second & 240, -1, -2)
    return out.reshape(blocks.shape)
