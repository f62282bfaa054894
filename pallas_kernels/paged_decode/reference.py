"""What paged_decode means: numpy, float32, one sequence and one head at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ids = NDArray[np.int32]


def gather(pages: Array, table: Ids, head: int, start: int, stop: int) -> Array:
    """Rows start to stop of one sequence and kv head: [stop - start, head_dim]."""
    page_size = pages.shape[2]
    return np.stack([pages[table[i // page_size], head, i % page_size] for i in range(start, stop)])


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """softmax(scale · q kᵀ) v of one query. q: [head_dim]; k, v: [keys, head_dim]."""
    scores = (k @ q) * np.float32(scale)
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ v


def paged_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Ids,
    lengths: Ids,
    *,
    scale: float,
    window: int | None = None,
) -> Array:
    """Shapes as in `api.paged_decode`."""
    out = np.zeros_like(q)
    for b, length in enumerate(lengths):
        start = 0 if window is None else max(0, int(length) - window)
        for head in range(q.shape[1]):
            if length:
                k = gather(k_pages, block_tables[b], head, start, length)
                v = gather(v_pages, block_tables[b], head, start, length)
                for i in range(q.shape[2]):
                    out[b, head, i] = attend(q[b, head, i], k, v, scale)
    return out
