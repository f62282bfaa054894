"""Grouped matmul in Mosaic GPU for many rows an expert: tiles of 128 rows and 256 columns, as large as registers allow.

A block is a producer warpgroup, which loads rows and weights by TMA into a ring of shared memory, and two consumers of
64 rows each. The 256 columns are 128 of gate and the same 128 of up, so that the activation is applied to accumulators,
or 256 of a plain product. One wgmma stays in flight while the next operands are awaited.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_mlp.activations import activate, erf
from pallas_kernels.moe.config import DEPTH, PREFILL_TILE, PrefillConfig
from pallas_kernels.moe.plan import Plan
from pallas_kernels.moe.work import for_units, locate
from pallas_kernels.mosaic import interpreted, swizzled

WG = plgpu.Layout.WGMMA
ROWS = 64
"""Of a consumer: the rows of a wgmma."""
CONSUMERS = PREFILL_TILE // ROWS
CHUNK = 64
"""Columns that are stored together."""


def prefill_rows(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    plan: Plan,
    config: PrefillConfig,
    *,
    activation: str | None,
    interpret: Any = None,
) -> jax.Array:
    """x: [rows, inputs], laid out as the plan says, in tiles of 128; weight: [experts, inputs, pieces * width]; bias:
    [experts, pieces * width] or None. With an activation there are two pieces, gate and up. Returns [rows, width] in
    x's dtype. Rows of tiles that are not live are not written.
    """
    rows, inputs = x.shape
    pieces = 1 if activation is None else 2
    width, piece = weight.shape[2] // pieces, config.piece
    columns, steps, stages, dtype = width // piece, inputs // DEPTH, config.stages, x.dtype

    def kernel(*refs: Any) -> None:
        x_g, w_g, *bias_g, expert_g, live_g, out_g, sm = refs
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        live = live_g[0]

        def place(unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """(first row, first column, expert)"""
            row, column = locate(unit, live, columns, config.band)
            return row * (PREFILL_TILE), column * piece, expert_g[row]

        def produce() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def unit(u: jax.Array, count: jax.Array) -> jax.Array:
                row, column, expert = place(u)

                def load(j: jax.Array, count: jax.Array) -> jax.Array:
                    slot = lax.rem(count, stages)

                    @pl.when(count >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(sm["free"].at[slot])

                    at, full = pl.ds(pl.multiple_of(j * DEPTH, DEPTH), DEPTH), sm["full"].at[slot]
                    mine = pl.ds(pl.multiple_of(row, PREFILL_TILE), PREFILL_TILE)
                    plgpu.copy_gmem_to_smem(x_g.at[mine, at], sm["x"].at[slot], full)
                    for p in range(pieces):
                        col = pl.multiple_of(column + p * width, piece)
                        plgpu.copy_gmem_to_smem(w_g.at[expert, at, pl.ds(col, piece)], sm["w"].at[slot, p], full)
                    return count + 1

                return lax.fori_loop(0, steps, load, count)

            count = for_units(block, config.blocks, live * columns, unit, jnp.int32(0))
            for s in range(stages):  # the interpreter insists that every phase is observed

                @pl.when(count > s)
                def _(s: int = s) -> None:
                    plgpu.barrier_wait(sm["free"].at[lax.rem(count - 1 - s, stages)])

        def consume() -> None:
            plgpu.set_max_registers(232, action="increase")
            out_s = sm["out"].at[wg]

            def unit(u: jax.Array, count: jax.Array) -> jax.Array:
                row, column, expert = place(u)

                def product(*accs: Any) -> None:
                    def step(j: jax.Array, count: jax.Array) -> jax.Array:
                        slot = lax.rem(count, stages)
                        plgpu.barrier_wait(sm["full"].at[slot])
                        rows = sm["x"].at[slot, pl.ds(wg * ROWS, ROWS)]
                        for p, acc in enumerate(accs):
                            plgpu.wgmma(acc, rows, sm["w"].at[slot, p])
                        plgpu.wgmma_wait(pieces)  # the step before is done

                        @pl.when(j > 0)
                        def _() -> None:
                            plgpu.barrier_arrive(sm["free"].at[lax.rem(count + stages - 1, stages)])

                        return count + 1

                    lax.fori_loop(0, steps, step, count)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(sm["free"].at[lax.rem(count + steps - 1, stages)])
                    sums = [acc[...] for acc in accs]
                    chunks, turn = piece // CHUNK, lax.div(count, steps)
                    for c in range(chunks):
                        at = slice(c * CHUNK, (c + 1) * CHUNK)
                        parts = [s[:, at] for s in sums]
                        if bias_g:
                            for p in range(pieces):
                                col = pl.multiple_of(column + p * width + c * CHUNK, CHUNK)
                                ref = bias_g[0].at[expert, pl.ds(col, CHUNK)]
                                b = plgpu.load(ref, layout=WG.reduce(0), optimized=False).astype(jnp.float32)
                                parts[p] = parts[p] + lax.broadcast_in_dim(b, (ROWS, CHUNK), (1,))
                        out = parts[0] if activation is None else activate(activation, parts[0], parts[1], erf=erf)
                        half = c % 2 if chunks % 2 == 0 else lax.rem(turn + c, 2)
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store from this half, two chunks ago
                        out_s.at[half][...] = out.astype(dtype)
                        plgpu.commit_smem()
                        first = pl.multiple_of(row + wg * ROWS, ROWS)
                        col = pl.multiple_of(column + c * CHUNK, CHUNK)
                        plgpu.copy_smem_to_gmem(out_s.at[half], out_g.at[pl.ds(first, ROWS), pl.ds(col, CHUNK)])

                pl.run_scoped(product, *[plgpu.ACC((ROWS, piece), jnp.float32)] * pieces)
                return count + steps

            for_units(block, config.blocks, live * columns, unit, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == CONSUMERS)(produce)
        pl.when(wg < CONSUMERS)(consume)

    scratch: dict[str, Any] = {
        "x": plgpu.SMEM((stages, PREFILL_TILE, DEPTH), dtype, transforms=swizzled(dtype, DEPTH)),
        "w": plgpu.SMEM((stages, pieces, DEPTH, piece), dtype, transforms=swizzled(dtype, piece)),
        "out": plgpu.SMEM((CONSUMERS, 2, ROWS, CHUNK), dtype, transforms=swizzled(dtype, CHUNK)),
        "full": plgpu.Barrier(num_arrivals=pieces + 1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    }
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid=(config.blocks,),
        kernel_name="moe",
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        **interpreted(interpret),
    )(x, weight, *([] if bias is None else [bias]), plan.tile_experts, plan.live)
