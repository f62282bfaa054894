"""What cache_append means: numpy, float32, one token at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Su et al. 2021, on halves: dimension i turns with i + head_dim / 2. x: [heads, head_dim]; cos, sin: [half]."""
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        out[:, i] = x[:, i] * cos[i] - x[:, i + half] * sin[i]
        out[:, i + half] = x[:, i + half] * cos[i] + x[:, i] * sin[i]
    return out


def cache_append(
    q: Array,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    k_pages: Array,
    v_pages: Array,
    page_ids: NDArray[np.int32],
    offsets: NDArray[np.int32],
) -> tuple[Array, Array, Array]:
    """Shapes as in `api.cache_append`."""
    q, k_pages, v_pages = q.copy(), k_pages.copy(), v_pages.copy()
    for token, (page, offset) in enumerate(zip(page_ids, offsets, strict=True)):
        for head in range(q.shape[1]):
            q[token, head] = rotate(q[token, head], cos[token], sin[token])
        if page < len(k_pages):
            k_pages[page, :, offset] = rotate(k[token], cos[token], sin[token])
            v_pages[page, :, offset] = v[token]
    return q, k_pages, v_pages
