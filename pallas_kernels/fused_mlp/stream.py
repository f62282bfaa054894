"""Few tokens against many weights: Mosaic GPU kernel that reads every weight once, at the speed of memory.

Operands are swapped, out^T = W^T x^T: columns of the weights fill the 64 rows that wgmma demands, and the tokens are
its N, as few as 8. A block is one producer warpgroup, which loads chunks of the weights (and of x, which the L2 cache
holds) by TMA into a ring of shared memory, and consumers of 64 columns each. A consumer has the gate and the up columns
of the same outputs, so the activation is applied to the accumulators in registers. Where there are fewer tiles than
multiprocessors, the blocks of a cluster share the inputs of a tile, and the first adds up what the others summed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_mlp.activations import activate, erf
from pallas_kernels.fused_mlp.config import StreamConfig
from pallas_kernels.mosaic import interpreted, swizzled
from pallas_kernels.rms_norm.fold import Fold, Norm

COLUMNS = 64
"""Of a consumer: what wgmma takes as rows."""
WG, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED


def stream(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    config: StreamConfig,
    interpret: Any = None,
) -> jax.Array:
    """x: [M, K]; weight: [K, parts, N], parts 2 (gate, up) or 1; bias: [parts, N]; residual: [M, N]; M <= config.rows,
    and below 8 or a multiple of it.

    Returns activation(x @ weight + bias) + residual, [M, N]. K must be a multiple of config.chunk, N of 64.
    """
    made = _run(x, None, weight, bias, residual, activation=activation, config=config, interpret=interpret)
    return made["out"]


def normed_stream(
    x: jax.Array,
    norm: Norm,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    activation: str | None,
    config: StreamConfig,
    interpret: Any = None,
) -> dict[str, jax.Array]:
    """The same product of the norm of x, `out`, and x + norm.delta, `total`, if there is a delta.

    x: at most `fold.MOST_ROWS` rows.
    """
    return _run(x, norm, weight, bias, None, activation=activation, config=config, interpret=interpret)


def _run(
    x: jax.Array,
    norm: Norm | None,
    weight: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    config: StreamConfig,
    interpret: Any,
) -> dict[str, jax.Array]:
    (tokens, inputs), (_, parts, outputs), dtype = x.shape, weight.shape, x.dtype
    rows, consumers, chunk, stages = config.rows, config.consumers, config.chunk, config.stages
    width, steps, split = consumers * COLUMNS, inputs // chunk, config.split
    tiles = outputs // width
    blocks = min(config.blocks or tiles, tiles)
    other_steps = steps // split
    first_steps = steps - (split - 1) * other_steps
    fold = None if norm is None else Fold(norm, x, tokens, consumers)

    def publish() -> None:
        """What other blocks of the cluster wrote and the copy engine reads: barriers between blocks do not order it."""
        if interpret is None:  # the interpreter's memory has one order

            @plgpu.inline_mgpu()
            def _fence(_: Any) -> None:
                mosaic_utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
                mosaic_utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

            _fence()

    def kernel(*refs: Any) -> None:
        gmem, smem = dict(zip(names, refs, strict=False)), refs[-1]
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        turns = pl.cdiv(tiles - block, blocks)
        rank = lax.axis_index("split") if split > 1 else jnp.int32(0)
        mine = jnp.where(rank == 0, first_steps, other_steps) if split > 1 else steps
        start = jnp.where(rank == 0, 0, first_steps + (rank - 1) * other_steps)

        def produce() -> None:
            def load(i: jax.Array, _: None) -> None:
                column = pl.multiple_of((block + i // mine * blocks) * width, width)
                k = pl.multiple_of((start + lax.rem(i, mine)) * chunk, chunk)
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(smem["free"].at[slot])

                full = smem["full"].at[slot]
                for part in range(parts):
                    weights = gmem["weight"].at[pl.ds(k, chunk), part, pl.ds(column, width)]
                    plgpu.copy_gmem_to_smem(weights, smem["weight"].at[slot, part], full)
                plgpu.copy_gmem_to_smem(gmem["x"].at[pl.ds(0, rows), pl.ds(k, chunk)], smem["x"].at[slot], full)
                if fold is not None:
                    fold.load(gmem, smem, (slot,), 0, k, full)

            total = turns * mine
            lax.fori_loop(0, total, load, None)
            for s in range(stages):  # the interpreter insists that every phase is observed

                @pl.when(total > s)
                def _drain(s: int = s) -> None:
                    plgpu.barrier_wait(smem["free"].at[lax.rem(total - 1 - s, stages)])

        def consume() -> None:
            half = pl.ds(wg * COLUMNS, COLUMNS)
            out = smem["out"].at[wg]
            if fold is not None:
                pl.when(wg == 0)(lambda: fold.measure(gmem, smem, block * split + rank, blocks * split))
                plgpu.barrier_wait(smem["measured"])

            def tile(turn: jax.Array, _: None) -> None:
                column = pl.multiple_of((block + turn * blocks) * width + wg * COLUMNS, COLUMNS)

                def accumulate(*acc: Any) -> list[jax.Array]:
                    def step(i: jax.Array, _: None) -> None:
                        slot = lax.rem(turn * mine + i, stages)
                        plgpu.barrier_wait(smem["full"].at[slot])
                        if fold is not None:
                            fold.normalise(smem, smem["x"].at[slot], (slot,), slot, wg)
                            fold.wait(smem, slot)
                        for part in range(parts):
                            weights = smem["weight"].at[slot, part, :, half]
                            plgpu.wgmma(acc[part], weights.transpose((1, 0)), smem["x"].at[slot].transpose((1, 0)))
                        # The chunk before this one has been multiplied when only this one's products are under way.
                        plgpu.wgmma_wait(parts)

                        @pl.when(i > 0)
                        def _release() -> None:
                            plgpu.barrier_arrive(smem["free"].at[lax.rem(turn * mine + i - 1, stages)])

                    lax.fori_loop(0, mine, step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(smem["free"].at[lax.rem(turn * mine + mine - 1, stages)])
                    return [a[...] for a in acc]

                if residual is not None:

                    @pl.when(rank == 0)
                    def _fetch() -> None:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        source = gmem["residual"].at[pl.ds(0, rows), pl.ds(column, COLUMNS)]
                        plgpu.copy_gmem_to_smem(source, out, smem["added"].at[wg])

                products = pl.run_scoped(accumulate, *[plgpu.ACC((COLUMNS, rows), jnp.float32)] * parts)
                if split == 1:
                    finish(products, column)
                    return
                sums = smem["sums"].at[wg]
                tile_sums = gmem["sums"].at[(block + turn * blocks) * consumers + wg]

                @pl.when(rank > 0)
                def _send() -> None:
                    for part in range(parts):
                        sums[0, part] = products[part]
                    plgpu.commit_smem()
                    for part in range(parts):
                        plgpu.copy_smem_to_gmem(sums.at[0, part], tile_sums.at[rank - 1, part])
                    plgpu.wait_smem_to_gmem(0)

                publish()
                plgpu.barrier_arrive(smem["summed"].at[wg])
                plgpu.barrier_wait(smem["summed"].at[wg])
                publish()

                @pl.when(rank == 0)
                def _receive() -> None:
                    pairs = [(other, part) for other in range(split - 1) for part in range(parts)]
                    for pair in pairs:
                        plgpu.copy_gmem_to_smem(tile_sums.at[pair], sums.at[pair], smem["received"].at[wg])
                    plgpu.barrier_wait(smem["received"].at[wg])
                    totals = list(products)
                    for other, part in pairs:
                        totals[part] += plgpu.load(sums.at[other, part], layout=WG)
                    finish(totals, column)

            def finish(products: list[jax.Array], column: jax.Array) -> None:
                biases = []
                if bias is not None:
                    for part in range(parts):
                        source = gmem["bias"].at[part, pl.ds(column, COLUMNS)]
                        biases.append(plgpu.load(source, layout=WG.reduce(1), optimized=False).astype(jnp.float32))
                values = [y + lax.broadcast_in_dim(b, y.shape, (0,)) for y, b in zip(products, biases)] or products
                y = values[0]
                if activation is not None:
                    y = activate(activation, y, values[1] if parts == 2 else None, erf=erf)
                if residual is not None:
                    plgpu.barrier_wait(smem["added"].at[wg])
                    terms = plgpu.load(out.transpose((1, 0)), layout=TRANSPOSED)
                    y = y + plgpu.layout_cast(terms.astype(jnp.float32), WG)
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out.transpose((1, 0))[...] = plgpu.layout_cast(y.astype(dtype), TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, gmem["out"].at[pl.ds(0, rows), pl.ds(column, COLUMNS)])

            lax.fori_loop(0, turns, tile, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    made = {"out": jax.ShapeDtypeStruct((tokens, outputs), dtype)}
    scratch: dict[str, Any] = {
        "weight": plgpu.SMEM((stages, parts, chunk, width), dtype, transforms=swizzled(dtype, width)),
        "x": plgpu.SMEM((stages, rows, chunk), dtype, transforms=swizzled(dtype, chunk)),
        "out": plgpu.SMEM((consumers, rows, COLUMNS), dtype, transforms=swizzled(dtype, COLUMNS)),
        "full": plgpu.Barrier(num_arrivals=parts + 1 + (0 if fold is None else len(fold.given)), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    }
    if residual is not None:
        scratch["added"] = plgpu.Barrier(num_barriers=consumers)
    if fold is not None:
        given |= fold.given
        made |= fold.made
        scratch |= fold.scratch(rows, (stages,), chunk, chunk)
    if split > 1:
        sums_shape = (split - 1, parts, COLUMNS, rows)
        made["sums"] = jax.ShapeDtypeStruct((tiles * consumers, *sums_shape), jnp.float32)
        scratch |= {
            "sums": plgpu.SMEM((consumers, *sums_shape), jnp.float32, transforms=swizzled(jnp.float32, rows)),
            "summed": plgpu.ClusterBarrier(collective_axes=("split",), num_barriers=consumers),
            "received": plgpu.Barrier(num_arrivals=(split - 1) * parts, num_barriers=consumers),
        }
    operands = {name: array for name, array in given.items() if array is not None}
    names = (*operands, *made)
    out = plgpu.kernel(
        kernel,
        out_type=tuple(made.values()),
        grid=(blocks,),
        kernel_name=("" if norm is None else "norm_") + ("gate_up" if parts == 2 else "projection"),
        grid_names=("block",),
        cluster=(split,) if split > 1 else (),
        cluster_names=("split",) if split > 1 else (),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **interpreted(interpret),
    )(*operands.values())
    return dict(zip(made, out, strict=True))
