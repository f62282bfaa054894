"""How a decode step's keys are divided over the blocks of the attention kernel: computed once, used by every layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_decode.config import Config

SLOTS = 2
"""A block leaves at most this many rows unfinished: its first and its last."""
COUNTERS = 17
"""Where in a run the counters of its slots are."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["runs", "sequences", "pages"], meta_fields=["config", "window"]
)
@dataclass(frozen=True)
class Plan:
    """A row is the work on one (sequence, head tile); it is made of tiles of `config.tile` keys.

    The tiles of all rows, in order of sequence, head, position, are cut into equal runs, one a block. Where tiles are
    few, some blocks have none.
    """

    runs: jax.Array
    """[blocks, 20] i32: where a block starts (sequence, head tile, tile of the row), its tiles, its rows; what
    `sequences` says of its first sequence; that of the sequence that follows; of its first row, and of its last, the
    slot of the row's first part (the others are in the first slots of the blocks that follow), and of both how many
    parts they have; of its two slots, how many parts of a row that starts there have arrived: 0 between two kernels,
    who leave it so."""
    sequences: jax.Array
    """[batch, 4] i32: first tile that holds a visible key, tiles from there, length, next sequence that has tiles."""
    pages: jax.Array
    """[blocks, stages, pages of a tile] i32: where a block's first tiles are, so that it need not look into the block
    tables before it loads them."""
    config: Config
    window: int | None


def divide(lengths: jax.Array, block_tables: jax.Array, config: Config, window: int | None) -> Plan:
    """lengths: [batch] i32, tokens in the cache; 0 for a row of padding. block_tables: [batch, width] i32.

    Sums and searches are written as reductions over [batch, batch] and [blocks, batch], which fuse; sorts and
    scans would be kernels of their own.
    """
    batch, heads, tile = lengths.shape[0], config.head_tiles, config.tile
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

    block = jnp.arange(config.blocks, dtype=jnp.int32)
    cuts = Cuts(ends[-1], jnp.max(tiles), config)
    start, stop = cuts.first_tile(block), cuts.first_tile(block + 1)

    def place(tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sequence, head tile and tile of the row of tiles of the whole work."""
        sequence = jnp.minimum(jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32), batch - 1)
        offset = tile - (ends - work)[sequence]
        length = jnp.maximum(tiles[sequence], 1)
        return sequence, offset // length, offset % length

    def share(sequence: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Slot of a row's first part, and its parts."""
        begin = (ends - work)[sequence] + head * tiles[sequence]
        owner, last = cuts.block_of(begin), cuts.block_of(begin + tiles[sequence] - 1)
        return SLOTS * owner + (cuts.first_tile(owner) != begin), last - owner + 1

    loaded = start[:, None] + jnp.arange(config.stages)
    wanted = jnp.concatenate([loaded, stop[:, None] - 1], axis=1)  # in one: a reduction is a kernel
    found = [x.reshape(wanted.shape) for x in place(wanted.reshape(-1))]
    (sequence, head, at), (last_sequence, last_head, _) = ([x[:, i] for x in found] for i in (0, -1))
    rows = (busy_before[last_sequence] * heads + last_head) - (busy_before[sequence] * heads + head) + 1
    rows = jnp.where(stop > start, rows, 0)
    where = jnp.stack([sequence, head, at, stop - start, rows], axis=1)
    slots, parts = zip(share(sequence, head), share(last_sequence, last_head), strict=True)
    zeros = jnp.zeros((config.blocks, SLOTS + 1), jnp.int32)
    shares = jnp.stack([*slots, *parts], axis=1)
    runs = jnp.concatenate([where, sequences[sequence], sequences[following[sequence]], shares, zeros], axis=1)

    sequence, _, at = (x[:, :-1, None] for x in found)
    page = (first[sequence] + at) * config.pages_per_tile // config.tiles_per_page + jnp.arange(config.pages_per_tile)
    pages = block_tables[sequence, jnp.minimum(page, (jnp.maximum(lengths, 1)[sequence] - 1) // config.page_size)]
    return Plan(runs, sequences, pages.astype(jnp.int32), config, window)


class Cuts:
    """Where all tiles, in order, are cut. No block before the last that has tiles is without."""

    def __init__(self, total: jax.Array, longest: jax.Array, config: Config):
        """total: tiles; longest: those of the longest row."""
        self.total = total
        busy = jnp.clip(total // jnp.clip(longest // config.cut, 1, config.least), 1, config.blocks)
        self.even, self.longer = total // busy, total % busy

    def first_tile(self, block: jax.Array) -> jax.Array:
        return jnp.minimum(self.even * block + jnp.minimum(block, self.longer), self.total)

    def block_of(self, tile: jax.Array) -> jax.Array:
        first = self.longer * (self.even + 1)
        rest = self.longer + (tile - first) // jnp.maximum(self.even, 1)
        return jnp.where(tile < first, tile // (self.even + 1), rest)
