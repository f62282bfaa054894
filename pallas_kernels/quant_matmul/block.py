"""What all warpgroups of the kernel know: the numbers it was cut by, memory, and where tiles lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.formats import Format
from pallas_kernels.quant_matmul.config import Config
from pallas_kernels.rms_norm.fold import Fold

BAND = 8
"""Tiles of rows of x that pass over a tile of the weight together: what they read of x stays in the L2 cache."""
LINE = 128
"""Bytes of a row of a tile in shared memory; what a thread takes into registers at once."""


@dataclass(frozen=True)
class Cut:
    """Numbers fixed when the kernel is built."""

    config: Config
    count: int
    """Rows of x."""
    inputs: int
    slabs: int
    """Of `config.height` outputs, in each part of the weight."""
    parts: int
    """1, or 2: outputs of the second are combined with those of the first."""
    format: Format
    group: int
    """Inputs that share a scale; where a scale is an output's, inputs that wgmma takes from shared memory at once."""
    dtype: Any
    """Of x: 16 bits, or the weight's 8."""
    out_dtype: Any
    interpret: Any
    fold: Fold | None = None
    """The norm of x, if there is one."""

    @property
    def grouped(self) -> bool:
        return self.format == "int4"

    @property
    def narrow(self) -> bool:
        """Whether matrix units take x and the weight as they are, 8 bits."""
        return jnp.dtype(self.dtype).itemsize == 1

    @property
    def per_byte(self) -> int:
        return 2 if self.grouped else 1

    @property
    def piece(self) -> int:
        """Inputs that a consumer widens at once."""
        return min(self.config.depth, LINE * self.per_byte)

    @cached_property
    def taken(self) -> int:
        """Slabs of a part that a block takes; each is `members` consumers' work."""
        return self.config.consumers // self.members

    @property
    def members(self) -> int:
        """Consumers whose sums meet."""
        return self.parts * self.config.ways

    @cached_property
    def down(self) -> int:
        return pl.cdiv(self.slabs, self.taken)

    @cached_property
    def tiles(self) -> int:
        """For a cluster to take."""
        return pl.cdiv(self.count, self.config.rows) * self.down

    @cached_property
    def steps(self) -> int:
        """Stages of a tile."""
        return self.inputs // self.config.split // self.config.ways // self.config.depth

    @cached_property
    def clusters(self) -> int:
        return min(self.config.blocks // self.config.split, self.tiles)

    @cached_property
    def ring(self) -> int:
        """Tiles whose scales lie in shared memory."""
        return self.config.stages // self.steps + 2


@dataclass(frozen=True)
class Block:
    """A block while it runs."""

    cut: Cut
    gmem: dict[str, Any]
    smem: dict[str, Any]
    cluster: jax.Array
    rank: jax.Array
    """Which part of the inputs, in a cluster that shares them."""

    @property
    def turns(self) -> jax.Array:
        return pl.cdiv(self.cut.tiles - self.cluster, self.cut.clusters)

    def tile(self, turn: jax.Array) -> jax.Array:
        return self.cluster + turn * self.cut.clusters

    def place(self, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First row of x and first slab of outputs of this block's part of a tile."""
        cut = self.cut
        tile, rows = self.tile(turn), cut.config.rows
        band = lax.div(tile, BAND * cut.down)
        rest = lax.rem(tile, BAND * cut.down)
        members = lax.min(pl.cdiv(cut.count, rows) - band * BAND, BAND)
        row, slab = band * BAND + lax.rem(rest, members), lax.div(rest, members)
        return pl.multiple_of(row * rows, rows), slab * cut.taken

    def part_of_inputs(self, step: jax.Array, way: int | jax.Array) -> jax.Array:
        """Which stretch of `depth` inputs a consumer's way takes in a step."""
        cut, ways = self.cut, self.cut.config.ways
        if cut.grouped:  # scales of a way are loaded 8 groups at a time
            return (self.rank * ways + way) * cut.steps + step
        return (self.rank * cut.steps + step) * ways + way
