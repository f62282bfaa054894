"""What paged_prefill means: numpy, float32; a token is a decode of its own over the cache, up to itself if causal."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_decode.reference import Array, Ids, paged_decode


def paged_prefill(
    q: Array,
    pages: KVPages,
    block_tables: Ids,
    query_start: Ids,
    lengths: Ids,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
) -> Array:
    """Shapes as in `api.paged_prefill`."""
    options: dict[str, Any] = {"scale": scale, "window": window, "chunk": chunk, "soft_cap": soft_cap}
    options |= {"sinks": sinks, "alibi_slopes": alibi_slopes}
    out = np.zeros(q.shape, np.float32)
    for b, length in enumerate(lengths):
        rows = range(query_start[b], query_start[b + 1])
        for row in rows:
            context = np.asarray([length - (rows.stop - 1 - row if causal else 0)], np.int32)
            table = block_tables[b : b + 1]
            out[row] = paged_decode(q[row : row + 1], pages, table, context, **options)[0]
    return out
