"""The warpgroup that loads: tiles of the weight and of x, by TMA, into a ring of shared memory."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quant_matmul.block import Block
from pallas_kernels.quant_matmul.config import row_scales
from pallas_kernels.quant_matmul.widen import ROWS


def produce(block: Block) -> None:
    """Every stage of every tile of this block, in the order in which they are consumed."""
    cut, gmem, smem = block.cut, block.gmem, block.smem
    config, steps, taken = cut.config, cut.steps, cut.taken
    stored = config.depth // cut.per_byte

    def load_scales(turn: jax.Array, row: jax.Array, slab: jax.Array) -> None:
        at = lax.rem(turn, cut.ring)
        if cut.narrow:
            scales = gmem["row_scales"].at[pl.ds(row, row_scales(config.rows))]
            plgpu.copy_gmem_to_smem(scales, smem["row_scales"].at[at], smem["scaled"].at[at])
        for part in range(cut.parts):
            scales = gmem["scales"].at[pl.ds(part * cut.slabs + slab, taken), pl.ds(0, ROWS)]
            mine = smem["scales"].at[at, pl.ds(part * taken, taken)]
            plgpu.copy_gmem_to_smem(scales, mine, smem["scaled"].at[at])

    def load(i: jax.Array, _: None) -> None:
        turn, step, slot = lax.div(i, steps), lax.rem(i, steps), lax.rem(i, config.stages)
        row, slab = block.place(turn)

        @pl.when(i >= config.stages)
        def _wait() -> None:
            plgpu.barrier_wait(smem["free"].at[slot])

        if not cut.grouped:
            pl.when(step == 0)(lambda: load_scales(turn, row, slab))
        for way in range(config.ways):
            piece = block.part_of_inputs(step, way)
            # Slabs lower than 64, slabs and rows past the last: what a copy finds outside an array is 0. Past the first
            # part's last slab it finds the second part's: they are multiplied, and not stored.
            for part in range(cut.parts):
                at = pl.ds(pl.multiple_of(piece * stored, stored), stored)
                values = gmem["values"].at[pl.ds(part * cut.slabs + slab, taken), pl.ds(0, ROWS), at]
                mine = smem["values"].at[slot, way, pl.ds(part * taken, taken)]
                plgpu.copy_gmem_to_smem(values, mine, smem["full"].at[slot])
            at = pl.ds(pl.multiple_of(piece * config.depth, config.depth), config.depth)
            x = gmem["x"].at[pl.ds(row, config.rows), at]
            plgpu.copy_gmem_to_smem(x, smem["x"].at[slot, way], smem["full"].at[slot])
            if cut.fold is not None:
                first = pl.multiple_of(piece * config.depth, config.depth)
                cut.fold.load(gmem, smem, (slot, way), row, first, smem["full"].at[slot])

    total = block.turns * steps
    lax.fori_loop(0, total, load, None)
    for s in range(config.stages):  # the interpreter insists that every phase is observed

        @pl.when(total > s)
        def _drain(s: int = s) -> None:
            plgpu.barrier_wait(smem["free"].at[lax.rem(total - 1 - s, config.stages)])
