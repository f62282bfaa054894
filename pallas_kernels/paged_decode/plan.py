"""How a decode step's keys are divided over the blocks of the attention kernel: computed once, used by every layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_decode.config import Config

SLOTS = 2
"""A block leaves at most this many rows unfinished: its first and its last."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["runs", "sequences", "merges"], meta_fields=["config", "window"]
)
@dataclass(frozen=True)
class Plan:
    """A row is the work on one (sequence, head tile); it is made of tiles of `config.tile` keys.

    The tiles of all rows, in order of sequence, head, position, are cut into equal runs, one a block.
    """

    runs: jax.Array
    """[blocks, 16] i32: where a block starts (sequence, head tile, tile of the row), its tiles, its rows; then
    what `sequences` says of its first sequence; then that of the sequence that follows."""
    sequences: jax.Array
    """[batch, 4] i32: first tile that holds a visible key, tiles from there, length, next sequence that has tiles."""
    merges: jax.Array
    """[merges, 8] i32 rows that several blocks share: sequence, head tile, parts (below 2: nothing to merge), slot of
    the first part, block after it; the later parts are in the first slots of the blocks from there."""
    config: Config
    window: int | None


def divide(lengths: jax.Array, config: Config, window: int | None) -> Plan:
    """lengths: [batch] i32, tokens in the cache; 0 for a row of padding.

    Sums and searches are written as reductions over [batch, batch] and [blocks, batch], which fuse; sorts and
    scans would be kernels of their own.
    """
    batch, heads, blocks, tile = lengths.shape[0], config.head_tiles, config.blocks, config.tile
    lengths = lengths.astype(jnp.int32)
    index = jnp.arange(batch, dtype=jnp.int32)
    visible = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - config.queries + 1 - window, 0)
    first = visible // tile
    tiles = jnp.where(lengths > 0, -(-lengths // tile) - first, 0)
    work = tiles * heads
    ends = jnp.sum(jnp.where(index[None, :] <= index[:, None], work[None, :], 0), axis=1, dtype=jnp.int32)
    busy_before = jnp.sum((index[None, :] < index[:, None]) & (tiles[None, :] > 0), axis=1, dtype=jnp.int32)
    later = (index[None, :] > index[:, None]) & (tiles[None, :] > 0)
    following = jnp.min(jnp.where(later, index[None, :], batch), axis=1)
    following = jnp.where(following == batch, index, following)
    sequences = jnp.stack([first, tiles, lengths, following], axis=1)

    total = ends[-1]
    share, extra = total // blocks, total % blocks

    def bound(block: jax.Array) -> jax.Array:
        """First tile of a block."""
        return share * block + jnp.minimum(block, extra)

    def block_of(tile: jax.Array) -> jax.Array:
        long = extra * (share + 1)
        return jnp.where(tile < long, tile // (share + 1), extra + (tile - long) // jnp.maximum(share, 1))

    def place(tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sequence, head tile and tile of the row of tiles of the whole work."""
        sequence = jnp.minimum(jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32), batch - 1)
        offset = tile - (ends - work)[sequence]
        length = jnp.maximum(tiles[sequence], 1)
        return sequence, offset // length, offset % length

    block = jnp.arange(blocks, dtype=jnp.int32)
    start, stop = bound(block), bound(block + 1)
    sequence, head, at = place(start)
    last_sequence, last_head, _ = place(stop - 1)
    rows = (busy_before[last_sequence] * heads + last_head) - (busy_before[sequence] * heads + head) + 1
    rows = jnp.where(stop > start, rows, 0)
    where = jnp.stack([sequence, head, at, stop - start, rows], axis=1)
    zeros = jnp.zeros((blocks, 3), jnp.int32)
    runs = jnp.concatenate([where, sequences[sequence], sequences[following[sequence]], zeros], axis=1)

    if batch * heads < blocks:
        row = jnp.arange(batch * heads, dtype=jnp.int32)
        sequence, head, cut = row // heads, row % heads, tiles[row // heads] > 0
        leader = jnp.full_like(row, -1)
    else:  # a row is merged on behalf of the first block that starts inside it
        sequence, head, at, leader = sequence[1:], head[1:], at[1:], block[1:]
        cut = (at > 0) & (stop > start)[1:]
    begin = (ends - work)[sequence] + head * tiles[sequence]
    owner = block_of(begin)
    parts = block_of(begin + tiles[sequence] - 1) - owner + 1
    parts = jnp.where(cut & ((leader == -1) | (leader == owner + 1)), parts, 0)
    slot = SLOTS * owner + (bound(owner) != begin)
    zero = jnp.zeros_like(parts)
    merges = jnp.stack([sequence, head, parts, slot, owner + 1, zero, zero, zero], axis=1)
    return Plan(runs, sequences, merges, config, window)
