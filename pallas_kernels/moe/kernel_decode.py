"""Grouped matmul in Mosaic GPU for few rows an expert: the weights stream through shared memory once.

Operands are swapped, out^T = W^T x^T: the weights' columns fill the 64 rows that wgmma demands, and the expert's few
rows are its N. A block is a producer warpgroup, which keeps a ring of weight tiles in flight, and consumers, each with
64 columns of every piece: gate and up, so that the activation is applied to accumulators, or one piece of a plain
product. The inputs of a plain product may be split among blocks, whose partial sums the caller adds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_mlp.activations import activate, erf
from pallas_kernels.moe.config import LANES, DecodeConfig
from pallas_kernels.moe.plan import Plan
from pallas_kernels.moe.work import for_units, locate
from pallas_kernels.mosaic import interpreted, swizzled

WG, WG_T = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED


def decode_rows(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    plan: Plan,
    config: DecodeConfig,
    *,
    activation: str | None,
    interpret: Any = None,
) -> jax.Array:
    """x: [rows, inputs], laid out as the plan says; weight: [experts, inputs, pieces * width]; bias: [experts, pieces *
    width] or None. With an activation there are two pieces, gate and up: returns [1, rows, width] in x's dtype. Without
    one, [splits, rows, width] f32, to be summed. Rows of tiles that are not live are not written.
    """
    rows, inputs = x.shape
    pieces = 1 if activation is None else 2
    width = weight.shape[2] // pieces
    consumers, splits, depth = config.consumers, config.splits, config.depth
    columns, steps = width // (LANES * consumers), inputs // (depth * splits)
    tile, stages, dtype = plan.tile, config.stages, x.dtype

    def kernel(*refs: Any) -> None:
        x_g, w_g, *bias_g, expert_g, live_g, out_g, sm = refs
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        live = live_g[0]
        units = live * (columns * splits)

        def place(unit: jax.Array) -> tuple[jax.Array, ...]:
            """(split, row tile, first column, expert)"""
            split, rest = lax.rem(unit, splits), lax.div(unit, splits)
            row, column = locate(rest, live, columns, config.band)
            return split, row, column * (LANES * consumers), expert_g[row]

        def produce() -> None:
            def unit(u: jax.Array, count: jax.Array) -> jax.Array:
                split, row, column, expert = place(u)

                def load(j: jax.Array, count: jax.Array) -> jax.Array:
                    slot = lax.rem(count, stages)

                    @pl.when(count >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(sm["free"].at[slot])

                    at = pl.ds(pl.multiple_of((split * steps + j) * depth, depth), depth)
                    full = sm["full"].at[slot]
                    for piece in range(pieces):
                        col = pl.multiple_of(column + piece * width, LANES)
                        src = w_g.at[expert, at, pl.ds(col, LANES * consumers)]
                        plgpu.copy_gmem_to_smem(src, sm["w"].at[slot, piece], full)
                    rows = pl.ds(pl.multiple_of(row * tile, tile), tile)
                    plgpu.copy_gmem_to_smem(x_g.at[rows, at], sm["x"].at[slot], full)
                    return count + 1

                return lax.fori_loop(0, steps, load, count)

            count = for_units(block, config.blocks, units, unit, jnp.int32(0))
            for s in range(stages):  # the interpreter insists that every phase is observed

                @pl.when(count > s)
                def _(s: int = s) -> None:
                    plgpu.barrier_wait(sm["free"].at[lax.rem(count - 1 - s, stages)])

        def consume() -> None:
            mine = pl.ds(wg * LANES, LANES)

            def unit(u: jax.Array, count: jax.Array) -> jax.Array:
                split, row, column, expert = place(u)

                def product(*accs: Any) -> list[jax.Array]:
                    def step(j: jax.Array, count: jax.Array) -> jax.Array:
                        slot = lax.rem(count, stages)
                        plgpu.barrier_wait(sm["full"].at[slot])
                        x_t = sm["x"].at[slot].transpose((1, 0))
                        for piece, acc in enumerate(accs):
                            plgpu.wgmma(acc, sm["w"].at[slot, piece, :, mine].transpose((1, 0)), x_t)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(sm["free"].at[slot])
                        return count + 1

                    lax.fori_loop(0, steps, step, count)
                    return [acc[...] for acc in accs]

                sums = pl.run_scoped(product, *[plgpu.ACC((LANES, tile), jnp.float32)] * pieces)
                first = column + wg * LANES
                if bias_g:
                    for piece in range(pieces):
                        at = pl.ds(pl.multiple_of(first + piece * width, LANES), LANES)
                        b = plgpu.load(bias_g[0].at[expert, at], layout=WG.reduce(1), optimized=False)
                        b = lax.broadcast_in_dim(b.astype(jnp.float32), (LANES, tile), (0,))
                        sums[piece] = sums[piece] + b
                out = sums[0] if activation is None else activate(activation, sums[0], sums[1], erf=erf)
                rows = pl.ds(pl.multiple_of(row * tile, tile), tile)
                out_ref = out_g.at[split, rows, pl.ds(pl.multiple_of(first, LANES), LANES)]
                out_ref.transpose((1, 0))[...] = plgpu.layout_cast(out.astype(out_g.dtype), WG_T)
                return count + steps

            for_units(block, config.blocks, units, unit, jnp.int32(0))

        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    scratch: dict[str, Any] = {
        "w": plgpu.SMEM((stages, pieces, depth, LANES * consumers), dtype, transforms=swizzled(dtype, LANES)),
        "x": plgpu.SMEM((stages, tile, depth), dtype, transforms=swizzled(dtype, depth)),
        "full": plgpu.Barrier(num_arrivals=pieces + 1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    }
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, rows, width), jnp.float32 if activation is None else dtype),
        grid=(config.blocks,),
        kernel_name="moe",
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        **interpreted(interpret),
    )(x, weight, *([] if bias is None else [bias]), plan.tile_experts, plan.live)
