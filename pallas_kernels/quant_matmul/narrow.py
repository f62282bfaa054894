"""The warpgroups that multiply where x has 8 bits, too: both operands go to the matrix units as they lie in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quant_matmul.consume import Consumer
from pallas_kernels.quant_matmul.widen import PER_ROW, ROWS, WG

F32 = jnp.float32


def both_scaled(consumer: Consumer, turn: jax.Array) -> jax.Array:
    """Sums of a tile, [64, rows] f32, of outputs and rows of x that each have a scale of their own."""
    cut, smem = consumer.block.cut, consumer.block.smem
    slot, shape = lax.rem(turn, cut.ring), (ROWS, cut.config.rows)
    total = (exact if cut.format == "int8" else promoted)(consumer, turn)
    plgpu.barrier_wait(smem["scaled"].at[slot])
    by_output = plgpu.load(smem["scales"].at[slot, consumer.slab], layout=PER_ROW)
    by_row = smem["row_scales"].at[slot, pl.ds(0, cut.config.rows)]
    by_row = plgpu.load(by_row, layout=WG.reduce(0), optimized=False)
    return total * lax.broadcast_in_dim(by_output, shape, (0,)) * lax.broadcast_in_dim(by_row, shape, (1,))


def exact(consumer: Consumer, turn: jax.Array) -> jax.Array:
    """Of int8: int32 holds the sums of up to 133,000 inputs."""
    cut = consumer.block.cut
    first, last = turn * cut.steps, (turn + 1) * cut.steps - 1

    def accumulate(acc: Any) -> jax.Array:
        def step(i: jax.Array, _: None) -> None:
            values, x = consumer.arrival(i)
            plgpu.wgmma(acc, values, x.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # of the stage before: the matrix units always have another to go on with
            pl.when(i > first)(lambda: consumer.release(i - 1))

        lax.fori_loop(first, last + 1, step, None)
        # Or the compiler converts what it finds in the registers before it waits for the matrix units.
        total = lax.optimization_barrier(acc[...])
        consumer.release(last)
        return total

    return pl.run_scoped(accumulate, plgpu.ACC((ROWS, cut.config.rows), jnp.int32)).astype(F32)


def promoted(consumer: Consumer, turn: jax.Array) -> jax.Array:
    """Of fp8: the matrix units add with some 14 bits, so those of a stage only; stages are added in float32."""
    cut = consumer.block.cut

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        values, x = consumer.arrival(i)

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, values, x.transpose((1, 0)))
            return acc[...]

        total += pl.run_scoped(product, plgpu.ACC((ROWS, cut.config.rows), F32))
        consumer.release(i)
        return total

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, cut.config.rows), F32), WG)
    return lax.fori_loop(turn * cut.steps, (turn + 1) * cut.steps, step, zeros)
