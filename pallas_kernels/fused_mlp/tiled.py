"""Many tokens: Mosaic GPU matmul whose epilogue is the activation.

A block has one producer warpgroup and two consumers of 64 tokens each; each holds the gate and the up product of the
same outputs in registers. Blocks are persistent, and the producer loads the next tile while the consumers finish this.
(Sharing the weights between two blocks of a cluster, by multicast, was measured: no faster, slower for few tokens.)
Tokens and outputs past the end are zeros on the way in and dropped on the way out, by the copy engine.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_mlp.activations import activate, erf
from pallas_kernels.fused_mlp.config import TiledConfig
from pallas_kernels.mosaic import interpreted, swizzled

CONSUMERS, ROWS, CHUNK, PIECE = 2, 64, 64, 64
"""ROWS: tokens of a consumer. CHUNK: inputs that travel together. PIECE: outputs that the epilogue takes at once."""
WG = plgpu.Layout.WGMMA


def tiled(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    activation: str,
    cores: int,
    config: TiledConfig,
    interpret: Any = None,
) -> jax.Array:
    """x: [M, K]; weight: [K, 2, N], gate first; bias: [2, N]. Returns activation(x · gate) · (x · up), [M, N].

    M must be a multiple of 8, K and N of 64.
    """
    (tokens, inputs), (_, parts, outputs), dtype = x.shape, weight.shape, x.dtype
    columns, stages = config.columns, config.stages
    block_rows = CONSUMERS * ROWS
    tall, wide, steps = pl.cdiv(tokens, block_rows), pl.cdiv(outputs, columns), inputs // CHUNK
    blocks = min(cores, tall * wide)
    slots = columns // PIECE

    def place(tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First token and first output of a tile."""
        group, rest = tile // (config.group * wide), lax.rem(tile, config.group * wide)
        height = jnp.minimum(config.group, tall - group * config.group)
        row, column = group * config.group + lax.rem(rest, height), rest // height
        return pl.multiple_of(row * block_rows, block_rows), pl.multiple_of(column * columns, columns)

    def kernel(*refs: Any) -> None:
        x_g, weight_g, bias_g = *refs[:2], refs[2] if bias is not None else None
        out_g, smem = refs[-2], refs[-1]
        wg, first = lax.axis_index("wg"), lax.axis_index("tile")
        turns = pl.cdiv(tall * wide - first, blocks)

        def produce() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def tile(turn: jax.Array, _: None) -> None:
                row, column = place(first + turn * blocks)

                def load(step: jax.Array, _: None) -> None:
                    i = turn * steps + step
                    slot, k = lax.rem(i, stages), pl.multiple_of(step * CHUNK, CHUNK)

                    @pl.when(i >= stages)
                    def _wait() -> None:
                        plgpu.barrier_wait(smem["free"].at[slot])

                    full = smem["full"].at[slot]
                    plgpu.copy_gmem_to_smem(x_g.at[pl.ds(row, block_rows), pl.ds(k, CHUNK)], smem["x"].at[slot], full)
                    for part in range(parts):
                        weights = weight_g.at[pl.ds(k, CHUNK), part, pl.ds(column, columns)]
                        plgpu.copy_gmem_to_smem(weights, smem["weight"].at[slot, part], full)

                lax.fori_loop(0, steps, load, None)

            lax.fori_loop(0, turns, tile, None)
            total = turns * steps
            for s in range(stages):  # the interpreter insists that every phase is observed

                @pl.when(total > s)
                def _drain(s: int = s) -> None:
                    plgpu.barrier_wait(smem["free"].at[lax.rem(total - 1 - s, stages)])

        def consume() -> None:
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * ROWS, ROWS)

            def tile(turn: jax.Array, _: None) -> None:
                row, column = place(first + turn * blocks)
                base = turn * steps

                def accumulate(*acc: Any) -> list[jax.Array]:
                    def step(i: jax.Array, _: None) -> None:
                        slot = lax.rem(base + i, stages)
                        plgpu.barrier_wait(smem["full"].at[slot])
                        for part in range(parts):
                            plgpu.wgmma(acc[part], smem["x"].at[slot, mine], smem["weight"].at[slot, part])
                        plgpu.wgmma_wait(parts)  # the chunk before this one is done with

                        @pl.when(i > 0)
                        def _release() -> None:
                            plgpu.barrier_arrive(smem["free"].at[lax.rem(base + i - 1, stages)])

                    lax.fori_loop(0, steps, step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(smem["free"].at[lax.rem(base + steps - 1, stages)])
                    return [a[...] for a in acc]

                products = pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, columns), jnp.float32)] * parts)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for piece in range(slots):
                    at = pl.multiple_of(column + piece * PIECE, PIECE)

                    @pl.when(at < outputs)
                    def _finish(piece: int = piece, at: jax.Array = at) -> None:
                        gate, up = (y[:, piece * PIECE : (piece + 1) * PIECE] for y in products)
                        if bias_g is not None:
                            terms = [
                                plgpu.load(bias_g.at[part, pl.ds(at, PIECE)], layout=WG.reduce(0), optimized=False)
                                for part in range(parts)
                            ]
                            gate, up = (
                                y + lax.broadcast_in_dim(b.astype(jnp.float32), y.shape, (1,))
                                for y, b in zip((gate, up), terms)
                            )
                        out = smem["out"].at[wg, piece]
                        out[...] = activate(activation, gate, up, erf=erf).astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(out, out_g.at[pl.ds(row + wg * ROWS, ROWS), pl.ds(at, PIECE)])

            lax.fori_loop(0, turns, tile, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(wg == CONSUMERS)(produce)
        pl.when(wg < CONSUMERS)(consume)

    scratch: dict[str, Any] = {
        "x": plgpu.SMEM((stages, block_rows, CHUNK), dtype, transforms=swizzled(dtype, CHUNK)),
        "weight": plgpu.SMEM((stages, parts, CHUNK, columns), dtype, transforms=swizzled(dtype, columns)),
        "out": plgpu.SMEM((CONSUMERS, slots, ROWS, PIECE), dtype, transforms=swizzled(dtype, PIECE)),
        "full": plgpu.Barrier(num_arrivals=parts + 1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    }
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens, outputs), dtype),
        grid=(blocks,),
        kernel_name="gate_up",
        grid_names=("tile",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **interpreted(interpret),
    )(*[a for a in (x, weight, bias) if a is not None])
