"""The end of a tile: sums of several warpgroups and blocks meet, and the outputs are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quant_matmul.block import Block
from pallas_kernels.quant_matmul.consume import Consumer
from pallas_kernels.quant_matmul.narrow import both_scaled
from pallas_kernels.quant_matmul.widen import ROWS, WG

type Combine = Callable[[jax.Array, jax.Array], jax.Array]


def consume(block: Block, wg: jax.Array, combine: Combine | None) -> None:
    """All tiles of one consumer."""
    cut, consumer, ending = block.cut, Consumer(block, wg), Ending(block, wg, combine)
    if (fold := cut.fold) is not None:
        split, smem = cut.config.split, block.smem
        turn = block.cluster * split + block.rank
        pl.when(wg == 0)(lambda: fold.measure(block.gmem, smem, turn, cut.clusters * split))
        plgpu.barrier_wait(smem["measured"])

    def tile(turn: jax.Array, _: None) -> None:
        row, slab = block.place(turn)
        if cut.narrow:
            total = both_scaled(consumer, turn)
        else:
            total = consumer.per_group(turn, slab) if cut.grouped else consumer.per_output(turn)
        ending.finish(total, turn, row, slab)

    lax.fori_loop(0, block.turns, tile, None)
    ending.drain()


@dataclass(frozen=True)
class Ending:
    """A warpgroup's part in it. Of the `members` that share outputs the first leads."""

    block: Block
    wg: jax.Array
    combine: Combine | None

    @property
    def taken(self) -> jax.Array:
        """Which of the block's slabs of outputs."""
        return lax.rem(lax.div(self.wg, self.block.cut.config.ways), self.block.cut.taken)

    @property
    def member(self) -> jax.Array:
        cut = self.block.cut
        part = lax.div(self.wg, cut.config.ways * cut.taken)
        return part * cut.config.ways + lax.rem(self.wg, cut.config.ways)

    def finish(self, total: jax.Array, turn: jax.Array, row: jax.Array, slab: jax.Array) -> None:
        """total: this warpgroup's sums, [64, rows] f32."""
        cut, smem, others = self.block.cut, self.block.smem, self.block.cut.members - 1
        if not others:
            self.store_or_meet(total, turn, row, slab)
            return
        sent, read = smem["sent"].at[self.taken], smem["read"].at[self.taken]

        @pl.when(self.member > 0)
        def _send() -> None:
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(read))
            smem["sums"].at[self.taken * others + self.member - 1][...] = total
            plgpu.barrier_arrive(sent)

        @pl.when(self.member == 0)
        def _lead() -> None:
            plgpu.barrier_wait(sent)
            parts: list[jax.Array] = []
            for member in range(cut.members):
                sums = smem["sums"].at[self.taken * others + member - 1]
                term = plgpu.load(sums, layout=WG) if member else total
                if member % cut.config.ways:
                    parts[-1] += term
                else:
                    parts.append(term)
            plgpu.barrier_arrive(read)
            whole = parts[0] if self.combine is None else self.combine(*parts)
            self.store_or_meet(whole, turn, row, slab)

    def drain(self) -> None:
        """The last tile is read and stored."""
        if self.block.cut.members > 1:  # the interpreter insists that every phase is observed

            @pl.when((self.member > 0) & (self.block.turns > 0))
            def _read() -> None:
                plgpu.barrier_wait(self.block.smem["read"].at[self.taken])

        plgpu.wait_smem_to_gmem(0)

    def store_or_meet(self, total: jax.Array, turn: jax.Array, row: jax.Array, slab: jax.Array) -> None:
        if self.block.cut.config.split == 1:
            self.store(total, row, slab)
        else:
            self.meet(total, turn, row, slab)

    def store(self, total: jax.Array, row: jax.Array, slab: jax.Array) -> None:
        cut, out = self.block.cut, self.block.smem["out"].at[self.taken]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        total = total.astype(cut.out_dtype)
        out.transpose((1, 0))[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        rows = pl.ds(row, cut.config.rows)
        plgpu.copy_smem_to_gmem(out, self.block.gmem["out"].at[rows, slab + self.taken, pl.ds(0, ROWS)])

    def meet(self, total: jax.Array, turn: jax.Array, row: jax.Array, slab: jax.Array) -> None:
        """The first block of the cluster adds the others' sums to its own; they meet in global memory, the L2 cache."""
        cut, rank = self.block.cut, self.block.rank
        summed = self.block.smem["summed"].at[self.taken]
        sums = self.block.gmem["sums"].at[self.block.tile(turn) * cut.taken + self.taken]

        @pl.when(rank > 0)
        def _send() -> None:
            sums[rank - 1] = total

        self.fence()
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        self.fence()

        @pl.when(rank == 0)
        def _receive() -> None:
            whole = total
            for other in range(cut.config.split - 1):
                whole += plgpu.load(sums.at[other], layout=WG, optimized=False)
            self.store(whole, row, slab)

    def fence(self) -> None:
        """What other blocks wrote before a barrier is seen after it; the barrier alone orders a block's own memory."""
        if self.block.cut.interpret is None:  # whose memory has one order

            @plgpu.inline_mgpu()
            def _fence(_: Any) -> None:
                mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)

            _fence()
