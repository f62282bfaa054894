"""What a step's attention is cut into: tiles of query rows, longest first. One plan serves all layers of a step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_prefill.config import CONSUMERS, ROWS, tile_heads

FIELDS = 5
"""Of a tile: sequence, first row of the batch, position of that row, rows (tokens), tokens in the sequence's cache."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tiles", "count"], meta_fields=["tile_tokens"])
@dataclass(frozen=True)
class Plan:
    """Tiles of at most `tile_tokens` tokens of one sequence; those past `count` are padding."""

    tiles: jax.Array
    """[most tiles, FIELDS] i32, by falling position of the last row. Rows of no sequence are tiles that end at position
    0, so that they see no key."""
    count: jax.Array
    """[1] i32"""
    tile_tokens: int


def make_plan(query_start: jax.Array, lengths: jax.Array, *, tokens: int, q_per_kv: int) -> Plan:
    """The plan of a step of `tokens` query rows, for the kernel. Made once a step, on the device.

    query_start: [batch + 1] i32; lengths: [batch] i32, tokens in the cache; q_per_kv: query heads of a kv head.
    """
    batch, tile_tokens = lengths.shape[0], CONSUMERS * ROWS // tile_heads(q_per_kv)
    most = tokens // tile_tokens + batch + 1
    # Rows past the last sequence belong to one more, whose cache is empty.
    starts = query_start.astype(jnp.int32)
    counts = jnp.append(starts[1:], tokens) - starts
    lengths = jnp.append(lengths.astype(jnp.int32), 0)

    ends = jnp.cumsum((counts + tile_tokens - 1) // tile_tokens)
    number = jnp.arange(most, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, number, side="right", method="compare_all"), batch).astype(jnp.int32)
    tiles_before = jnp.where(sequence == 0, 0, ends[sequence - 1])
    at = (number - tiles_before) * tile_tokens
    rows = jnp.minimum(counts[sequence] - at, tile_tokens)
    position = jnp.where(sequence == batch, -rows, lengths[sequence] - counts[sequence] + at)
    tiles = jnp.stack([sequence, starts[sequence] + at, position, rows, lengths[sequence]], axis=1)

    last = jnp.where(number < ends[-1], position + rows, -1)
    order = jnp.argsort(last, descending=True, stable=True)
    return Plan(tiles[order].astype(jnp.int32), ends[-1:].astype(jnp.int32), tile_tokens)
