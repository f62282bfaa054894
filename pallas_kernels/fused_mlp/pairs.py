"""65 to 256 tokens against weights without a gate: Mosaic GPU kernel whose blocks work alone or in pairs.

Operands are swapped as in `stream`. With so many tokens a tile of 64 outputs is bound by what a multiprocessor can take
in of x and weights together. So tiles are as square as an even share of the work for all multiprocessors allows, and
several blocks read the same weights at the same time, all but the first from the L2 cache. A pair of blocks, a cluster,
either shares the inputs of a tile, and then each adds up half of its tokens from what both summed, or has different
tokens and reads the weights together, a half each for both (multicast). Larger clusters leave multiprocessors idle.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_mlp.config import PairConfig
from pallas_kernels.mosaic import interpreted, swizzled

COLUMNS = 64
"""Of a consumer: what wgmma takes as rows."""
WG, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED


def paired(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    config: PairConfig,
    interpret: Any = None,
) -> jax.Array:
    """x: [M, K]; weight: [K, N]; bias: [N]; residual: [M, N]. Returns x @ weight + bias + residual, [M, N].

    M must be a multiple of 8 and at most config.rows · config.row_tiles, K a multiple of config.chunk, N of 64 times
    config.consumers.
    """
    (tokens, inputs), outputs, dtype = x.shape, weight.shape[1], x.dtype
    rows, consumers, chunk, stages = config.rows, config.consumers, config.chunk, config.stages
    width, steps, split, deal = config.width, inputs // chunk, config.split, config.deal
    piece = rows // split
    tiles = outputs // width * config.row_tiles
    pairs = split == 2 or config.share

    def ordered() -> None:
        """What one block of a pair wrote comes before what the other reads after their barrier."""
        if interpret is None:  # the interpreter's memory has one order

            @plgpu.inline_mgpu()
            def _fence(_: Any) -> None:
                mosaic_utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
                mosaic_utils.warpgroup_barrier()

            _fence()

    def kernel(*refs: Any) -> None:
        gmem, smem = dict(zip(names, refs, strict=False)), refs[-1]
        wg, tile = lax.axis_index("wg"), lax.axis_index("tile")
        rank = lax.axis_index("pair") if pairs else jnp.int32(0)
        if config.share:
            tile = tile * 2 + rank
        row = pl.multiple_of(lax.rem(tile, config.row_tiles) * rows, 8)
        column = pl.multiple_of(tile // config.row_tiles * width, width)
        start: Any = 0
        mine: Any = steps
        if split == 2:
            start, mine = rank * (steps - steps // 2), steps - steps // 2 - rank * (steps % 2)

        def produce() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def load(i: jax.Array, _: None) -> None:
                k, slot = pl.multiple_of((start + i) * chunk, chunk), lax.rem(i, stages)

                @pl.when(i >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(smem["free"].at[slot])

                full, shared = smem["full"].at[slot], "pair" if config.share else None
                weights = gmem["weight"].at[pl.ds(k, chunk), pl.ds(column, width)]
                plgpu.copy_gmem_to_smem(weights, smem["weight"].at[slot], full, collective_axes=shared)
                plgpu.copy_gmem_to_smem(gmem["x"].at[pl.ds(row, rows), pl.ds(k, chunk)], smem["x"].at[slot], full)

            lax.fori_loop(0, mine, load, None)
            for s in range(stages):  # a block leaves after its neighbour has read what it sent; and every phase is seen

                @pl.when(mine > s)
                def _drain(s: int = s) -> None:
                    plgpu.barrier_wait(smem["free"].at[lax.rem(mine - 1 - s, stages)])

        def consume() -> None:
            plgpu.set_max_registers(config.registers, action="increase")
            part, turn = wg // deal, lax.rem(wg, deal)
            at, out = pl.multiple_of(column + part * COLUMNS, COLUMNS), smem["out"].at[part]
            first = pl.multiple_of(row + rank * piece if split == 2 else row, 8)

            def accumulate(acc: Any) -> jax.Array:
                def step(i: jax.Array, _: None) -> None:
                    slot = lax.rem(i * deal + turn, stages)
                    plgpu.barrier_wait(smem["full"].at[slot])
                    weights = smem["weight"].at[slot, :, pl.ds(part * COLUMNS, COLUMNS)]
                    plgpu.wgmma(acc, weights.transpose((1, 0)), smem["x"].at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # the chunk before this one is done with

                    @pl.when(i > 0)
                    def _release() -> None:
                        plgpu.barrier_arrive(smem["free"].at[lax.rem((i - 1) * deal + turn, stages)])

                chunks = pl.cdiv(mine - turn, deal)
                lax.fori_loop(0, chunks, step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["free"].at[lax.rem((chunks - 1) * deal + turn, stages)])
                return acc[...]

            if residual is not None:

                @pl.when(turn == 0)
                def _fetch() -> None:
                    source = gmem["residual"].at[pl.ds(first, piece), pl.ds(at, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, out, smem["added"].at[part])

            y = pl.run_scoped(accumulate, plgpu.ACC((COLUMNS, rows), jnp.float32))
            if deal == 1:
                finish(y, part, at, first)
                return

            @pl.when(turn == 1)
            def _give() -> None:
                smem["other"][part] = y
                plgpu.barrier_arrive(smem["dealt"].at[part])

            @pl.when(turn == 0)
            def _take() -> None:
                plgpu.barrier_wait(smem["dealt"].at[part])
                finish(y + plgpu.load(smem["other"].at[part], layout=WG), part, at, first)

        def finish(y: jax.Array, part: jax.Array, at: jax.Array, first: jax.Array) -> None:
            """y: [64, rows], what this block summed."""
            out = smem["out"].at[part]
            if split == 2:
                halves = y[:, :piece], y[:, piece:]
                kept, given = lax.cond(rank == 0, lambda: halves, lambda: halves[::-1])
                sums = gmem["sums"].at[tile, part]
                sums.at[rank][...] = given
                ordered()
                plgpu.barrier_arrive(smem["summed"].at[part])
                plgpu.barrier_wait(smem["summed"].at[part])
                ordered()
                y = kept + plgpu.load(sums.at[1 - rank], layout=WG, optimized=False)
            if bias is not None:
                terms = plgpu.load(gmem["bias"].at[pl.ds(at, COLUMNS)], layout=WG.reduce(1), optimized=False)
                y += lax.broadcast_in_dim(terms.astype(jnp.float32), y.shape, (0,))
            if residual is not None:
                plgpu.barrier_wait(smem["added"].at[part])
                terms = plgpu.load(out.transpose((1, 0)), layout=TRANSPOSED)
                y += plgpu.layout_cast(terms.astype(jnp.float32), WG)
            out.transpose((1, 0))[...] = plgpu.layout_cast(y.astype(dtype), TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, gmem["out"].at[pl.ds(first, piece), pl.ds(at, COLUMNS)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    parts = consumers // deal
    free: dict[str, Any] = {"num_arrivals": parts, "num_barriers": stages}
    scratch: dict[str, Any] = {
        "weight": plgpu.SMEM((stages, chunk, width), dtype, transforms=swizzled(dtype, width)),
        "x": plgpu.SMEM((stages, rows, chunk), dtype, transforms=swizzled(dtype, chunk)),
        "out": plgpu.SMEM((parts, piece, COLUMNS), dtype, transforms=swizzled(dtype, COLUMNS)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.ClusterBarrier(collective_axes=("pair",), **free) if config.share else plgpu.Barrier(**free),
    }
    names = ["x", "weight", *["bias"] * (bias is not None), *["residual"] * (residual is not None), "out"]
    out_type = [jax.ShapeDtypeStruct((tokens, outputs), dtype)]
    if residual is not None:
        scratch["added"] = plgpu.Barrier(num_barriers=parts)
    if split == 2:
        names.append("sums")
        out_type.append(jax.ShapeDtypeStruct((tiles, parts, 2, COLUMNS, piece), jnp.float32))
        scratch["summed"] = plgpu.ClusterBarrier(collective_axes=("pair",), num_barriers=parts)
    if deal == 2:
        scratch["other"] = plgpu.SMEM((parts, COLUMNS, rows), jnp.float32, transforms=swizzled(jnp.float32, rows))
        scratch["dealt"] = plgpu.Barrier(num_barriers=parts)
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(tiles // 2 if config.share else tiles,),
        kernel_name="projection",
        grid_names=("tile",),
        cluster=(2,) if pairs else (),
        cluster_names=("pair",) if pairs else (),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[scratch],
        **interpreted(interpret),
    )(*[a for a in (x, weight, bias, residual) if a is not None])[0]
