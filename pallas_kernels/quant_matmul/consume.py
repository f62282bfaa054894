"""The warpgroups that multiply: each widens its part of a stage of the weight in registers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quant_matmul import widen
from pallas_kernels.quant_matmul.block import Block
from pallas_kernels.quant_matmul.widen import PER_ROW, ROWS, WG

F32 = jnp.float32
SCALES = 8
"""Groups of int4 whose scales are loaded together: 16 bytes."""


@dataclass(frozen=True)
class Consumer:
    """A warpgroup with 64 outputs of its own, or its way through the inputs of 64 that it shares."""

    block: Block
    wg: jax.Array

    @property
    def way(self) -> jax.Array:
        return lax.rem(self.wg, self.block.cut.config.ways)

    @property
    def slab(self) -> jax.Array:
        """Which of the block's slabs, those of the second part after those of the first."""
        return lax.div(self.wg, self.block.cut.config.ways)

    def multiply(
        self, acc: Any, tile: jax.Array, x_t: Any, first: int, size: int, zeros: Any = (), stage: Any = None
    ) -> None:
        """acc += the piece's inputs from `first` on, times theirs of x. stage: whose first piece this is."""
        cut, smem = self.block.cut, self.block.smem
        options: dict[str, Any] = {"first": first, "inputs": size, "interpret": cut.interpret}
        operand = widen.widen(tile, cut.format, cut.dtype, zeros=zeros[0] if zeros else None, **options)
        if cut.interpret is not None:  # whose wgmma takes no registers
            smem["wide"].at[self.wg][...] = operand
            plgpu.commit_smem()
            operand = smem["wide"].at[self.wg]
        if cut.fold is not None and stage is not None:  # weights were widened meanwhile
            cut.fold.wait(smem, self.place(stage))
        plgpu.wgmma(acc, operand, x_t)

    def arrival(self, i: jax.Array) -> tuple[Any, Any]:
        """This consumer's tile of the weight and of x, where they lie, once stage `i` is there."""
        slot, smem = lax.rem(i, self.block.cut.config.stages), self.block.smem
        plgpu.barrier_wait(smem["full"].at[slot])
        x, cut = smem["x"].at[slot, self.way], self.block.cut
        if cut.fold is not None:
            cut.fold.normalise(smem, x, (slot, self.way), self.place(i), self.slab)
        return smem["values"].at[slot, self.way, self.slab], x

    def place(self, i: jax.Array) -> jax.Array:
        """Of stage `i` of x, among all that there is room for."""
        config = self.block.cut.config
        return lax.rem(i, config.stages) * config.ways + self.way

    def load(self, values: Any, first: int) -> jax.Array:
        """A piece of a tile of the weight, as stored, in registers."""
        cut = self.block.cut
        values = values.at[:, pl.ds(first // cut.per_byte, cut.piece // cut.per_byte)]
        return plgpu.load(values, layout=widen.layout(cut.format))

    def release(self, i: jax.Array) -> None:
        plgpu.barrier_arrive(self.block.smem["free"].at[lax.rem(i, self.block.cut.config.stages)])

    def per_output(self, turn: jax.Array) -> jax.Array:
        """Sums of a tile, [64, rows] f32, where each output has one scale."""
        cut, smem = self.block.cut, self.block.smem
        slot = lax.rem(turn, cut.ring)
        plgpu.barrier_wait(smem["scaled"].at[slot])
        scales = plgpu.load(smem["scales"].at[slot, self.slab], layout=PER_ROW)

        def accumulate(acc: Any) -> jax.Array:
            def step(i: jax.Array, _: None) -> None:
                values, x = self.arrival(i)
                for first in range(0, cut.config.depth, cut.piece):
                    x_t = x.at[:, pl.ds(first, cut.piece)].transpose((1, 0))
                    self.multiply(acc, self.load(values, first), x_t, 0, cut.piece, stage=None if first else i)
                    # wgmma reads registers until it ends: the next piece may not be widened into them before.
                    plgpu.wgmma_wait(0)
                self.release(i)

            lax.fori_loop(turn * cut.steps, (turn + 1) * cut.steps, step, None)
            return acc[...]

        return pl.run_scoped(accumulate, plgpu.ACC((ROWS, cut.config.rows), F32)) * self.across_rows(scales)

    def per_group(self, turn: jax.Array, slab: jax.Array) -> jax.Array:
        """The same where a scale belongs to a group of inputs of output slab `slab` of a part.

        Products of a group are summed apart, then scaled. Scales are loaded one turn of the loop ahead.
        """
        block, cut = self.block, self.block.cut
        in_step, groups = cut.config.depth // cut.group, cut.steps * cut.config.depth // cut.group
        in_chunk = SCALES // in_step  # steps
        chunks, rest = divmod(cut.steps, in_chunk)
        part, slab = lax.div(self.slab, cut.taken), lax.min(slab + lax.rem(self.slab, cut.taken), cut.slabs - 1)
        first_group = block.part_of_inputs(jnp.int32(0), self.way) * in_step

        def fetch(chunk: jax.Array | int) -> list[jax.Array]:
            at = pl.ds(first_group + jnp.minimum(chunk * SCALES, groups - SCALES), SCALES)
            arrays = [
                block.gmem[name].at[part * cut.slabs + slab, :, at]
                for name in ("scales", "zeros")
                if name in block.gmem
            ]
            return [plgpu.load(array, layout=WG, optimized=False) for array in arrays]

        def add(total: jax.Array, loaded: list[jax.Array], at: jax.Array, stage: Any) -> jax.Array:
            """total + the groups of a step; the first of them is column `at` of `loaded`."""
            values, x = self.arrival(stage)
            for i in range(in_step):
                start, within = divmod(i * cut.group, cut.piece)
                if within == 0:
                    tile = self.load(values, start * cut.piece)
                scales, *zeros = [widen.column(array, at + i, cut.interpret) for array in loaded]
                x_t = x.at[:, pl.ds(i * cut.group, cut.group)].transpose((1, 0))
                options: dict[str, Any] = {"first": within, "size": cut.group, "stage": None if i else stage}
                multiplied = functools.partial(self.multiply, tile=tile, x_t=x_t, **options)

                def product(acc: Any, multiplied: Any = multiplied, zeros: list[Any] = zeros) -> jax.Array:
                    multiplied(acc, zeros=zeros)
                    return acc[...]

                total += pl.run_scoped(product, plgpu.ACC((ROWS, cut.config.rows), F32)) * self.across_rows(scales)
            return total

        def chunk(c: jax.Array, carry: Any, count: int = in_chunk, skipped: int = 0) -> Any:
            total, loaded = carry
            following = fetch(c + 1)

            def step(i: jax.Array, total: jax.Array) -> jax.Array:
                at = turn * cut.steps + c * in_chunk + i
                total = add(total, loaded, skipped + i * in_step, at)
                self.release(at)
                return total

            return lax.fori_loop(0, count, step, total), following

        carry = plgpu.layout_cast(jnp.zeros((ROWS, cut.config.rows), F32), WG), fetch(0)
        carry = lax.fori_loop(0, chunks, chunk, carry)
        if rest:
            carry = chunk(jnp.int32(chunks), carry, rest, SCALES - rest * in_step)
        return carry[0]

    def across_rows(self, vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (ROWS, self.block.cut.config.rows), (0,))
