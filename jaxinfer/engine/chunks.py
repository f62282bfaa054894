"""Attention within chunks by kernels that know nothing of them: each chunk becomes a sequence of its own.

A token of a layer with chunks sees its own chunk alone, so the chunk's pages and tokens are all there is. It takes
pages that end where chunks do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def chunks_apart(
    tables: jax.Array, query_start: jax.Array, lengths: jax.Array, *, chunk: int, page_size: int, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block tables, query_start and lengths of the chunks that a step's tokens are in, as if each were a sequence.

    tables: [batch, width] i32; query_start: [batch + 1] i32, where each sequence's tokens start; lengths: [batch] i32,
    its tokens in the cache, the step's included; chunk: tokens, a multiple of page_size; most: of the step's tokens,
    those of one sequence at most, so that they are in `parts` chunks at most.
    Returns [batch * parts, pages], [batch * parts + 1] and [batch * parts]; a chunk without tokens has length 0.
    """
    batch, width = tables.shape
    parts = (most + chunk - 2) // chunk + 1
    counts = (query_start[1:] - query_start[:-1])[:, None]
    first = lengths[:, None] - counts  # position of a sequence's first token
    starts = first // chunk * chunk + jnp.arange(parts) * chunk  # [batch, parts]
    before, until = (jnp.clip(edge - first, 0, counts) for edge in (starts, starts + chunk))
    inside = jnp.where(until > before, first + until - starts, 0)
    pages = starts[..., None] // page_size + jnp.arange(min(width, chunk // page_size))
    seen = jnp.take_along_axis(tables[:, None], jnp.minimum(pages, width - 1), axis=2)
    rows = jnp.append((query_start[:-1, None] + before).reshape(-1), query_start[-1])
    return seen.reshape(batch * parts, -1), rows, inside.reshape(-1)
