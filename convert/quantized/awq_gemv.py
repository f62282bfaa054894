"""AWQ, version "gemv": packed along the inputs, in order.

Of a projection X: X.qweight [outputs, inputs / 8] int32; X.qzeros [outputs, width] int32, packed along the groups, and
X.scales [outputs, 8 · width], both wider than there are groups. weight[o, i] = scales[o, g] · (q[o, i] - zero[o, g])
for input i of group g.
"""

from __future__ import annotations

import numpy as np

from convert.quantized.layer import GROUP_SIZES, Follows, LowBit, LowRows, Packed, Rows, part, read_float
from convert.quantized.packing import FLOAT_SCALES, unpack_columns
from convert.tensors import Reader, whole


def packed(reader: Reader, prefix: str, group_size: int) -> Packed:
    """group_size: -1: all inputs. Raises ValueError for tensors that are missing, or do not fit each other."""
    qweight, qzeros, scales = names = tuple(f"{prefix}.{name}" for name in ("qweight", "qzeros", "scales"))
    outputs, words = part(reader, qweight, ("I32",), (None, None)).shape
    inputs = 8 * words
    size = inputs if group_size == -1 else group_size
    groups, width = inputs // size, part(reader, qzeros, ("I32",), (outputs, None)).shape[1]
    part(reader, scales, FLOAT_SCALES, (outputs, 8 * width))
    if inputs % size or groups > 8 * width:
        raise ValueError(
            f"{scales} is for {8 * width} groups at most; {inputs} inputs in groups of {size} have {groups}"
        )

    def shared() -> tuple[np.ndarray, np.ndarray]:
        """Zero points and scales, [outputs, groups] float32."""
        zeros = unpack_columns(whole(reader, qzeros), 4, groups).astype(np.float32)
        return zeros, read_float(reader, scales)[:, :groups]

    def open_() -> Rows:
        zeros, scale = shared()

        def rows(start: int, stop: int) -> np.ndarray:
            values = unpack_columns(reader.read(qweight, start, stop), 4, inputs).astype(np.float32)
            grouped = values.reshape(stop - start, groups, size)
            grouped -= zeros[start:stop, :, None]
            grouped *= scale[start:stop, :, None]
            return values

        return rows

    def open_low() -> LowRows:
        zeros, scale = shared()

        def rows(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            values = unpack_columns(reader.read(qweight, start, stop), 4, inputs).astype(np.int8) - np.int8(8)
            return values, scale[start:stop], zeros[start:stop] - 8

        return rows

    follows: dict[str, Follows] = {
        name: (("outputs", 1), ("inputs", each)) for name, each in zip(names, (8, 8 * size, size), strict=True)
    }
    low_bit = LowBit("int4", size, False, open_low) if size in GROUP_SIZES else None
    return Packed(f"{prefix}.weight", (outputs, inputs), "AWQ 4-bit", names, open_, low_bit, follows)
