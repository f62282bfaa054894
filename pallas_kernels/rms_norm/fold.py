"""rms_norm within the Mosaic GPU kernel of the product behind it, for few rows: a kernel less is launched.

The weights' loads need no norm and are under way before it. Meanwhile one warpgroup of each block reads the whole rows,
as the kernel of rms_norm does, and finds each row's factor; x then comes in stages beside the weights, as without a
norm, and is normalised where it lies in shared memory. What is multiplied is what rms_norm would have written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import swizzled
from pallas_kernels.rms_norm.kernel import factor, load_sum

MOST_ROWS = 8
"""Every block reads all rows first."""
TOGETHER = 8192
"""Elements of rows whose loads are under way at once, or one row: they wait in registers."""
REDUCTION = 2048
"""Bytes that Mosaic takes for sums over a warpgroup."""
PIECE = 64
"""Inputs of all rows that a warpgroup normalises at once."""
TILE = plgpu.Layout.TILED(plgpu.Tiling(((8, PIECE), (2, PIECE), (4,))), (-5,), (-3, -2), -1)
"""A warp two rows, a thread 4 neighbours."""


@dataclass(frozen=True)
class Norm:
    """What x goes through before a product: `rms_norm` of x, or of x + delta."""

    scale: jax.Array
    """[inputs]"""
    delta: jax.Array | None
    """Of x's shape and dtype."""
    eps: float

    def room(self, rows: int) -> tuple[int, int]:
        """Bytes of shared memory: of each input of a stage of x, `rows` high, and of a block besides."""
        delta = 0 if self.delta is None else rows * self.delta.dtype.itemsize
        return self.scale.dtype.itemsize + delta, REDUCTION + 1024


@dataclass(frozen=True)
class Fold:
    """The norm in a kernel: numbers fixed when it is built, and what its warpgroups do."""

    norm: Norm
    x: jax.Array
    """[count, inputs], or its shape and dtype."""
    count: int
    """Rows that are no padding."""
    sharers: int
    """Warpgroups that read the same stage of x, and share the work on it."""

    @property
    def given(self) -> dict[str, jax.Array]:
        """Operands of the kernel."""
        delta = {} if self.norm.delta is None else {"delta": self.norm.delta}
        return {"gain": self.norm.scale, **delta}

    @property
    def made(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Results of the kernel."""
        return {} if self.norm.delta is None else {"total": jax.ShapeDtypeStruct(self.x.shape, self.x.dtype)}

    def scratch(self, rows: int, stages: tuple[int, ...], depth: int, columns: int) -> dict[str, Any]:
        """Shared memory and barriers. stages: of x, each [rows, depth] and swizzled for `columns`."""
        refs: dict[str, Any] = {
            "gain": plgpu.SMEM((*stages, depth), self.norm.scale.dtype),
            "factors": plgpu.SMEM((rows,), jnp.float32),
            "measured": plgpu.Barrier(),
        }
        if self.norm.delta is not None:
            refs["delta"] = plgpu.SMEM((*stages, rows, depth), self.x.dtype, transforms=swizzled(self.x.dtype, columns))
        if self.sharers > 1:
            refs["normalised"] = plgpu.Barrier(num_arrivals=self.sharers, num_barriers=math.prod(stages))
        return refs

    def load(self, gmem: Any, smem: Any, at: tuple[Any, ...], row: Any, first: Any, full: Any) -> None:
        """What a stage needs besides x, by the warpgroup that loads. first: input of the stage; full: its barrier."""
        depth = smem["gain"].shape[-1]
        plgpu.copy_gmem_to_smem(gmem["gain"].at[pl.ds(first, depth)], smem["gain"].at[at], full)
        if self.norm.delta is not None:
            rows = smem["delta"].shape[-2]
            source = gmem["delta"].at[pl.ds(row, rows), pl.ds(first, depth)]
            plgpu.copy_gmem_to_smem(source, smem["delta"].at[at], full)

    def measure(self, gmem: Any, smem: Any, block: jax.Array, blocks: int) -> None:
        """Every row's factor, by one warpgroup of a block. Blocks take turns in writing the sums, x + delta."""
        together = max(TOGETHER // self.x.shape[1], 1)
        for first in range(0, self.count, together):
            rows = range(first, min(first + together, self.count))
            loaded = [load_sum(gmem["x"].at[row], gmem["delta"].at[row] if self.made else None) for row in rows]
            for row, total in zip(rows, loaded, strict=True):
                smem["factors"].at[row][...] = factor(total.astype(jnp.float32), self.norm.eps)
            if rows[-1] == self.count - 1:
                plgpu.barrier_arrive(smem["measured"])
            for row, total in zip(rows, loaded, strict=True) if self.made else ():

                @pl.when(block == row % blocks)
                def _write(row: int = row, total: jax.Array = total) -> None:
                    gmem["total"].at[row][...] = total

    def normalise(self, smem: Any, x: Any, at: tuple[Any, ...], place: jax.Array, member: jax.Array) -> None:
        """This warpgroup's part of a stage of x, [rows, depth], in place; matrix units may read it after `wait`.

        at: where the stage is in `scratch`, place: the same as one number; member: which of the sharers this is.
        """
        rows, depth = x.shape
        factors = plgpu.load(smem["factors"], layout=TILE.reduce(1), optimized=False)

        def piece(first: Any) -> None:
            columns = pl.ds(first, PIECE)
            wide = plgpu.load(x.at[:, columns], layout=TILE, optimized=False).astype(jnp.float32)
            if self.norm.delta is not None:
                delta = plgpu.load(smem["delta"].at[at].at[:, columns], layout=TILE, optimized=False)
                wide = (wide + delta.astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
            gain = plgpu.load(smem["gain"].at[at].at[columns], layout=TILE.reduce(0), optimized=False)
            wide = wide * lax.broadcast_in_dim(factors, (rows, PIECE), (0,))
            wide = wide * lax.broadcast_in_dim(gain.astype(jnp.float32), (rows, PIECE), (1,))
            x.at[:, columns][...] = wide.astype(x.dtype)

        for first in range(0, depth, PIECE * self.sharers):
            mine = first + member * PIECE

            @pl.when(mine < depth)
            def _piece(mine: Any = mine) -> None:
                piece(pl.multiple_of(mine, PIECE))

        plgpu.commit_smem()
        if self.sharers > 1:
            plgpu.barrier_arrive(smem["normalised"].at[place])

    def wait(self, smem: Any, place: jax.Array) -> None:
        """For the other sharers' part of a stage."""
        if self.sharers > 1:
            plgpu.barrier_wait(smem["normalised"].at[place])
