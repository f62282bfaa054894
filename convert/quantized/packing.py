"""Small integers in 32-bit words."""

from __future__ import annotations

import numpy as np

FLOAT_SCALES = ("F16", "BF16", "F32")


def unpack_rows(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[words, columns] int32 → [count, columns] uint8. Each column is one stream of bits, the lowest first; a value may
    lie across two words.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    first = np.arange(count) * bits
    word, shift = first // 32, (first % 32).astype(np.uint32)
    values = words[word] >> shift[:, None]
    (split,) = np.nonzero(shift + bits > 32)
    values[split] |= words[word[split] + 1] << (32 - shift[split])[:, None]
    return (values & ((1 << bits) - 1)).astype(np.uint8)


def centred(values: np.ndarray, bits: int) -> np.ndarray:
    """int8, 2 ** (bits - 1) less."""
    return (values - np.uint8(1 << (bits - 1))).view(np.int8)


def unpack_columns(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[rows, words] int32 → [rows, count] uint8, as `unpack_rows` but along the rows; bits divide 32."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts
    return (values & ((1 << bits) - 1)).astype(np.uint8).reshape(len(words), -1)[:, :count]
