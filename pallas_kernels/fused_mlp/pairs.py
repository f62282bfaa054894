"""65 to 256 tokens against weights without a gate: Mosaic GPU kernel with a block for each tile, alone or in pairs.

Operands are swapped as in `stream`, but a tile's inputs are one block's: it is bound by what a multiprocessor takes in
of x and weights together, and exchanging sums costs more than leaving a quarter of the multiprocessors idle. The two
blocks of a pair, a cluster, have the same columns and half of the tokens each; each reads half of the weights for both
(multicast). Clusters of four leave so many multiprocessors idle that their blocks run in two waves.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
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

    M must be a multiple of 8 and at most config.rows, of each block of a pair; K a multiple of config.chunk, N of 64
    times config.consumers.
    """
    (tokens, inputs), outputs, dtype = x.shape, weight.shape[1], x.dtype
    rows, consumers, chunk, stages = config.rows, config.consumers, config.chunk, config.stages
    width, steps = consumers * COLUMNS, inputs // chunk

    def kernel(*refs: Any) -> None:
        gmem, smem = dict(zip(names, refs, strict=False)), refs[-1]
        wg = lax.axis_index("wg")
        row = pl.multiple_of(lax.axis_index("half") * rows, 8) if config.pairs else 0
        column = pl.multiple_of(lax.axis_index("tile") * width, width)

        def produce() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def load(i: jax.Array, _: None) -> None:
                k, slot = pl.multiple_of(i * chunk, chunk), lax.rem(i, stages)

                @pl.when(i >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(smem["free"].at[slot])

                full, both = smem["full"].at[slot], "half" if config.pairs else None
                weights = gmem["weight"].at[pl.ds(k, chunk), pl.ds(column, width)]
                plgpu.copy_gmem_to_smem(weights, smem["weight"].at[slot], full, collective_axes=both)
                plgpu.copy_gmem_to_smem(gmem["x"].at[pl.ds(row, rows), pl.ds(k, chunk)], smem["x"].at[slot], full)

            lax.fori_loop(0, steps, load, None)
            for i in range(max(steps - stages, 0), steps):  # a block leaves after the other has read what it sent
                plgpu.barrier_wait(smem["free"].at[i % stages])

        def consume() -> None:
            plgpu.set_max_registers(232, action="increase")
            at, out = pl.multiple_of(column + wg * COLUMNS, COLUMNS), smem["out"].at[wg]

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

                lax.fori_loop(0, steps, step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["free"].at[(steps - 1) % stages])
                return acc[...]

            if residual is not None:
                source = gmem["residual"].at[pl.ds(row, rows), pl.ds(at, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, out, smem["added"].at[wg])
            y = pl.run_scoped(accumulate, plgpu.ACC((COLUMNS, rows), jnp.float32))
            if bias is not None:
                terms = plgpu.load(gmem["bias"].at[pl.ds(at, COLUMNS)], layout=WG.reduce(1), optimized=False)
                y += lax.broadcast_in_dim(terms.astype(jnp.float32), y.shape, (0,))
            if residual is not None:
                plgpu.barrier_wait(smem["added"].at[wg])
                terms = plgpu.load(out.transpose((1, 0)), layout=TRANSPOSED)
                y += plgpu.layout_cast(terms.astype(jnp.float32), WG)
            out.transpose((1, 0))[...] = plgpu.layout_cast(y.astype(dtype), TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, gmem["out"].at[pl.ds(row, rows), pl.ds(at, COLUMNS)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    free: dict[str, Any] = {"num_arrivals": consumers, "num_barriers": stages}
    scratch: dict[str, Any] = {
        "weight": plgpu.SMEM((stages, chunk, width), dtype, transforms=swizzled(dtype, width)),
        "x": plgpu.SMEM((stages, rows, chunk), dtype, transforms=swizzled(dtype, chunk)),
        "out": plgpu.SMEM((consumers, rows, COLUMNS), dtype, transforms=swizzled(dtype, COLUMNS)),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.ClusterBarrier(collective_axes=("half",), **free) if config.pairs else plgpu.Barrier(**free),
    }
    if residual is not None:
        scratch["added"] = plgpu.Barrier(num_barriers=consumers)
    names = ["x", "weight", *["bias"] * (bias is not None), *["residual"] * (residual is not None), "out"]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens, outputs), dtype),
        grid=(outputs // width,),
        kernel_name="projection",
        grid_names=("tile",),
        cluster=(2,) if config.pairs else (),
        cluster_names=("half",) if config.pairs else (),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[scratch],
        **interpreted(interpret),
    )(*[a for a in (x, weight, bias, residual) if a is not None])
