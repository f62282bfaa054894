"""65 to 256 tokens against weights without a gate: Mosaic GPU kernel of blocks that share what they read and add.

There are few tiles then, and each wants all of x: at 128 tokens a tile of 64 outputs reads twice as much of x as of
the weights. So a tile is wide, the blocks of a cluster share its inputs (`split`), and where they need the same part of
x or of the weights each reads a share of it for all (multicast). Operands are swapped as in `stream`. What the blocks
of a tile summed they exchange through each other's shared memory, a slice of the tokens for each, and each adds up its
own: always in the same order, so that a token's result depends on nothing else.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_mlp.config import ClusterConfig
from pallas_kernels.mosaic import interpreted, swizzled

COLUMNS = 64
"""Of a consumer: what wgmma takes as rows."""
WG, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED


def clustered(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    config: ClusterConfig,
    interpret: Any = None,
) -> jax.Array:
    """x: [M, K]; weight: [K, N]; bias: [N]; residual: [M, N]. Returns x @ weight + bias + residual, [M, N].

    M must be a multiple of 8 and at most config.rows · config.row_tiles, K a multiple of config.chunk, N of what a
    cluster is wide.
    """
    (tokens, inputs), outputs, dtype = x.shape, weight.shape[1], x.dtype
    rows, consumers, chunk, stages, split = config.rows, config.consumers, config.chunk, config.stages, config.split
    width, steps, piece = consumers * COLUMNS, inputs // chunk, rows // split
    each, more = divmod(steps, split)

    def kernel(*refs: Any) -> None:
        gmem, smem = dict(zip(names, refs, strict=False)), dict(refs[-1])
        if split > 1 and config.reuse:
            (smem["weight"], smem["x"]), smem["sums"] = smem["memory"]
        wg, rank = lax.axis_index("wg"), lax.axis_index("split")
        row = pl.multiple_of(lax.axis_index("row") * rows, 8)
        column = pl.multiple_of(
            (lax.axis_index("tile") * config.column_tiles + lax.axis_index("column")) * width, width
        )
        start, mine = rank * each + jnp.minimum(rank, more), each + (rank < more)

        def produce() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def load(i: jax.Array, _: None) -> None:
                k, slot = pl.multiple_of((start + i) * chunk, chunk), lax.rem(i, stages)

                @pl.when(i >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(smem["free"].at[slot])

                for name, source, shared in (
                    ("weight", gmem["weight"].at[pl.ds(k, chunk), pl.ds(column, width)], config.row_tiles > 1),
                    ("x", gmem["x"].at[pl.ds(row, rows), pl.ds(k, chunk)], config.column_tiles > 1),
                ):
                    plgpu.copy_gmem_to_smem(
                        source,
                        smem[name].at[slot],
                        smem["full"].at[slot],
                        collective_axes=SHARED[name] if shared else None,
                    )

            lax.fori_loop(0, mine, load, None)
            for s in range(
                stages
            ):  # a block leaves after its neighbours have read what it sent; and every phase is seen

                @pl.when(mine > s)
                def _drain(s: int = s) -> None:
                    plgpu.barrier_wait(smem["free"].at[lax.rem(mine - 1 - s, stages)])

        def consume() -> None:
            plgpu.set_max_registers(config.registers, action="increase")
            at, out = pl.multiple_of(column + wg * COLUMNS, COLUMNS), smem["out"].at[wg]
            first = pl.multiple_of(row + rank * piece, 8)

            def accumulate(acc: Any) -> jax.Array:
                def step(i: jax.Array, _: None) -> None:
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(smem["full"].at[slot])
                    weights = smem["weight"].at[slot, :, pl.ds(wg * COLUMNS, COLUMNS)]
                    plgpu.wgmma(acc, weights.transpose((1, 0)), smem["x"].at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # the chunk before this one is done with

                    @pl.when(i > 0)
                    def _release() -> None:
                        plgpu.barrier_arrive(smem["free"].at[lax.rem(i - 1, stages)])

                lax.fori_loop(0, mine, step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["free"].at[lax.rem(mine - 1, stages)])
                return acc[...]

            if residual is not None:
                source = gmem["residual"].at[pl.ds(first, piece), pl.ds(at, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, out, smem["added"].at[wg])
            y = pl.run_scoped(accumulate, plgpu.ACC((COLUMNS, rows), jnp.float32))
            if split > 1:
                if config.reuse:  # nobody multiplies what is in the ring any more
                    plgpu.barrier_arrive(smem["drained"])
                    plgpu.barrier_wait(smem["drained"])
                for other in range(split):
                    plgpu.async_store_smem(
                        y[:, other * piece : (other + 1) * piece],
                        smem["sums"].at[wg, rank],
                        smem["received"].at[wg],
                        cluster_idx=jnp.int32(other),
                        cluster_dim="split",
                    )
                plgpu.barrier_wait(smem["received"].at[wg])
                y = plgpu.load(smem["sums"].at[wg, 0], layout=WG)
                for other in range(1, split):
                    y += plgpu.load(smem["sums"].at[wg, other], layout=WG)
            if bias is not None:
                terms = plgpu.load(gmem["bias"].at[pl.ds(at, COLUMNS)], layout=WG.reduce(1), optimized=False)
                y += lax.broadcast_in_dim(terms.astype(jnp.float32), y.shape, (0,))
            if residual is not None:
                plgpu.barrier_wait(smem["added"].at[wg])
                terms = plgpu.load(out.transpose((1, 0)), layout=TRANSPOSED)
                y += plgpu.layout_cast(terms.astype(jnp.float32), WG)
            out.transpose((1, 0))[...] = plgpu.layout_cast(y.astype(dtype), TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, gmem["out"].at[pl.ds(first, piece), pl.ds(at, COLUMNS)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    free: dict[str, Any] = {"num_arrivals": consumers, "num_barriers": stages}
    neighbours = tuple(
        SHARED[name] for name, count in (("x", config.column_tiles), ("weight", config.row_tiles)) if count > 1
    )
    ring = {
        "weight": plgpu.SMEM((stages, chunk, width), dtype, transforms=swizzled(dtype, width)),
        "x": plgpu.SMEM((stages, rows, chunk), dtype, transforms=swizzled(dtype, chunk)),
    }
    scratch: dict[str, Any] = {
        "out": plgpu.SMEM((consumers, piece, COLUMNS), dtype, transforms=swizzled(dtype, COLUMNS)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.ClusterBarrier(collective_axes=neighbours, **free) if neighbours else plgpu.Barrier(**free),
    }
    if residual is not None:
        scratch["added"] = plgpu.Barrier(num_barriers=consumers)
    if split > 1:
        shape = consumers, split, COLUMNS, piece
        sums = plgpu.SMEM(shape, jnp.float32, transforms=swizzled(jnp.float32, piece))
        if config.reuse:
            scratch["memory"] = plgpu.RefUnion([ring["weight"], ring["x"]], sums)
            scratch["drained"] = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=consumers)
        else:
            scratch |= {"sums": sums, **ring}
        scratch["received"] = plgpu.Barrier(num_arrivals=split, num_barriers=consumers)
    else:
        scratch |= ring
    names = ["x", "weight", *["bias"] * (bias is not None), *["residual"] * (residual is not None), "out"]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens, outputs), dtype),
        grid=(outputs // (width * config.column_tiles),),
        kernel_name="projection",
        grid_names=("tile",),
        cluster=(split, config.row_tiles, config.column_tiles),
        cluster_names=("split", "row", "column"),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[scratch],
        **interpreted(interpret),
    )(*[a for a in (x, weight, bias, residual) if a is not None])


SHARED = {"x": "column", "weight": "row"}
"""The axis of a cluster along which blocks need the same."""
