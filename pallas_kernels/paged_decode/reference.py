"""What paged_decode means: numpy, float32, one sequence, one query and one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pallas_kernels.kv_pages import KVPages

Array = NDArray[np.float32]
Ids = NDArray[np.int32]


def gather(pages: KVPages, table: Ids, head: int, start: int, stop: int) -> tuple[Array, Array]:
    """Keys and values start to stop of one sequence and kv head, dequantized: [stop - start, head_dim] each."""
    keys, values = [], []
    for position in range(start, stop):
        page, slot = table[position // pages.page_size], position % pages.page_size
        key = np.asarray(pages.k[page, head, slot], np.float32)
        if pages.k_scales is not None:
            key = key * pages.k_scales[page, head, slot]
        keys.append(key)
        if pages.v is None:
            values.append(key)
            continue
        value = np.asarray(
            pages.v[page, head, :, slot] if pages.v_transposed else pages.v[page, head, slot], np.float32
        )
        values.append(value if pages.v_scales is None else value * pages.v_scales[page, head, slot])
    return np.stack(keys), np.stack(values)


def attend(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    soft_cap: float | None,
    sink: np.float32 | None,
    slope: np.float32 | None,
) -> Array:
    """softmax(scale · q kᵀ) v of one query. q: [head_dim]; k, v: [keys, head_dim]; sink: a score without a value.

    slope: each key's score falls by it for every token that it is before the last (ALiBi, Press et al. 2022).
    """
    scores = (k @ q) * np.float32(scale)
    if soft_cap is not None:
        scores = np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))
    if slope is not None:
        scores = scores + slope * np.arange(1 - len(k), 1, dtype=np.float32)
    most = scores.max() if sink is None else max(scores.max(), sink)
    weights = np.exp(scores - most)
    total = weights.sum() + (0 if sink is None else np.exp(sink - most))
    return (weights / total) @ v


def paged_decode(
    q: Array,
    pages: KVPages,
    block_tables: Ids,
    lengths: Ids,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
) -> Array:
    """Shapes as in `api.paged_decode`; the leaves of `pages` are numpy arrays."""
    if q.ndim == 4:
        options: dict[str, Any] = {"scale": scale, "window": window, "chunk": chunk, "soft_cap": soft_cap}
        options |= {"sinks": sinks, "alibi_slopes": alibi_slopes}
        return paged_decode(q[:, None], pages, block_tables, lengths, **options)[:, 0]
    batch, queries, kv_heads, q_per_kv, _ = q.shape
    out = np.zeros(q.shape, np.float32)
    for b, t, head in np.ndindex(batch, queries, kv_heads):
        stop = int(lengths[b]) - (queries - 1 - t)  # what a query sees ends with itself
        start = 0 if window is None else max(0, stop - window)
        start = start if chunk is None else max(start, (stop - 1) // chunk * chunk)
        if stop > 0:
            k, v = gather(pages, block_tables[b], head, start, stop)
            for i in range(q_per_kv):
                sink = None if sinks is None else sinks[head, i]
                slope = None if alibi_slopes is None else alibi_slopes[head, i]
                out[b, t, head, i] = attend(q[b, t, head, i].astype(np.float32), k, v, scale, soft_cap, sink, slope)
    return out
