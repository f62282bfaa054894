"""x times a weight of 8 or 4 bits: a Mosaic GPU kernel for Hopper that widens weights in registers.

Operands are swapped, out^T = W x^T: outputs fill the 64 rows that wgmma demands, and the rows of x are its N, as few as
8. A block is one producer warpgroup, which loads tiles of the weight and of x by TMA into a ring of shared memory, and
consumers of 64 outputs each, which read their part of the weight into registers, widen it and multiply. A cluster of
`split` blocks shares the inputs of a tile; their sums meet in global memory (the L2 cache). Blocks are persistent: the
next tile's loads are under way while a tile ends.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import QuantizedArray
from pallas_kernels.mosaic import interpreted, swizzled
from pallas_kernels.quant_matmul import widen
from pallas_kernels.quant_matmul.config import Config
from pallas_kernels.quant_matmul.widen import PER_ROW, ROWS, WG

F32 = jnp.float32
BAND = 8
"""Tiles of rows of x that pass over a tile of the weight together: what they read of x stays in the L2 cache."""
LINE = 128
"""Bytes of a row of a tile in shared memory; what a thread takes into registers at once."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""A thread, of one producer and two consumers, where sums take more than the 168 of an even split."""
SCALES = 8
"""Groups of int4 whose scales are loaded together: 16 bytes."""


def quant_matmul(
    x: jax.Array, weight: QuantizedArray, out_dtype: Any, config: Config, *, interpret: Any = None
) -> jax.Array:
    """x: [rows, inputs] bf16 or f16; weight: of [outputs, inputs]. Returns [rows, outputs]; see `config.obstacle`."""
    count, inputs = x.shape
    rows, consumers, depth, stages, split = config.rows, config.consumers, config.depth, config.stages, config.split
    outputs, height, dtype = weight.outputs[0], config.height, x.dtype
    grouped = weight.format == "int4"
    per_byte = 2 if grouped else 1
    group = weight.group_size or min(depth, LINE)
    # The copy engine takes rows in eights, or all of them.
    padded = count if count < 8 else pl.cdiv(count, 8) * 8
    x = jnp.pad(x, ((0, padded - count), (0, 0)))
    across, slabs = pl.cdiv(count, rows), outputs // height
    down = pl.cdiv(slabs, consumers)
    tiles, steps = across * down, inputs // split // depth
    clusters = min(config.blocks // split, tiles)
    wide = rows > 64 and consumers == 2
    ring = stages // steps + 2
    piece = min(depth, LINE * per_byte)

    def fence() -> None:
        """What other blocks wrote before a barrier is seen after it; the barrier alone orders a block's own memory."""
        if interpret is None:  # whose memory has one order

            @plgpu.inline_mgpu()
            def _fence(_: Any) -> None:
                mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)

            _fence()

    def kernel(*refs: Any) -> None:
        gmem, smem = dict(zip(names, refs, strict=False)), refs[-1]
        wg, cluster = lax.axis_index("wg"), lax.axis_index("cluster")
        rank = lax.axis_index("split") if split > 1 else jnp.int32(0)
        turns = pl.cdiv(tiles - cluster, clusters)

        def place(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
            """First row of x and first slab of outputs of a tile."""
            tile = cluster + turn * clusters
            band = lax.div(tile, BAND * down)
            rest, members = lax.rem(tile, BAND * down), jnp.minimum(across - band * BAND, BAND)
            row, slab = band * BAND + lax.rem(rest, members), lax.div(rest, members)
            return pl.multiple_of(row * rows, rows), slab * consumers

        def produce() -> None:
            if wide:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(i: jax.Array, _: None) -> None:
                row, slab = place(lax.div(i, steps))
                step, slot = rank * steps + lax.rem(i, steps), lax.rem(i, stages)

                @pl.when(i >= stages)
                def _wait() -> None:
                    plgpu.barrier_wait(smem["free"].at[slot])

                if not grouped:

                    @pl.when(lax.rem(i, steps) == 0)
                    def _scales() -> None:
                        at = lax.rem(lax.div(i, steps), ring)
                        scales = gmem["scales"].at[pl.ds(slab, consumers), pl.ds(0, ROWS)]
                        plgpu.copy_gmem_to_smem(scales, smem["scales"].at[at], smem["scaled"].at[at])

                full, stored = smem["full"].at[slot], depth // per_byte
                at = pl.ds(pl.multiple_of(step * stored, stored), stored)
                # Slabs lower than 64, slabs and rows past the last: what a copy finds outside an array is 0.
                values = gmem["values"].at[pl.ds(slab, consumers), pl.ds(0, ROWS), at]
                plgpu.copy_gmem_to_smem(values, smem["values"].at[slot], full)
                at = pl.ds(pl.multiple_of(step * depth, depth), depth)
                plgpu.copy_gmem_to_smem(gmem["x"].at[pl.ds(row, rows), at], smem["x"].at[slot], full)

            total = turns * steps
            lax.fori_loop(0, total, load, None)
            for s in range(stages):  # the interpreter insists that every phase is observed

                @pl.when(total > s)
                def _drain(s: int = s) -> None:
                    plgpu.barrier_wait(smem["free"].at[lax.rem(total - 1 - s, stages)])

        def consume() -> None:
            if wide:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

            def multiply(acc: Any, tile: jax.Array, x_t: Any, first: int, size: int, zeros: Any = ()) -> None:
                """acc += the piece's inputs from `first` on, times theirs of x."""
                options: dict[str, Any] = {"first": first, "inputs": size, "interpret": interpret}
                operand = widen.widen(tile, weight.format, dtype, zeros=zeros[0] if zeros else None, **options)
                if interpret is not None:  # whose wgmma takes no registers
                    smem["wide"].at[wg][...] = operand
                    plgpu.commit_smem()
                    operand = smem["wide"].at[wg]
                plgpu.wgmma(acc, operand, x_t)

            def arrival(turn: jax.Array, step: jax.Array) -> tuple[Any, Any]:
                """A slot's tile of the weight and of x, where they lie."""
                slot = lax.rem(turn * steps + step, stages)
                plgpu.barrier_wait(smem["full"].at[slot])
                return smem["values"].at[slot, wg], smem["x"].at[slot]

            def load(values: Any, first: int) -> jax.Array:
                """A piece of a tile of the weight, as stored, in registers."""
                values = values.at[:, pl.ds(first // per_byte, piece // per_byte)]
                return plgpu.load(values, layout=widen.layout(weight.format))

            def release(turn: jax.Array, step: jax.Array | int) -> None:
                plgpu.barrier_arrive(smem["free"].at[lax.rem(turn * steps + step, stages)])

            def per_output(turn: jax.Array, slab: jax.Array) -> jax.Array:
                slot = lax.rem(turn, ring)
                plgpu.barrier_wait(smem["scaled"].at[slot])
                scales = plgpu.load(smem["scales"].at[slot, wg], layout=PER_ROW)

                def accumulate(acc: Any) -> jax.Array:
                    def step(i: jax.Array, _: None) -> None:
                        values, x_s = arrival(turn, i)
                        for first in range(0, depth, piece):
                            x_t = x_s.at[:, pl.ds(first, piece)].transpose((1, 0))
                            multiply(acc, load(values, first), x_t, 0, piece)
                            # wgmma reads registers until it ends: the next piece may not be widened into them before.
                            plgpu.wgmma_wait(0)
                        release(turn, i)

                    lax.fori_loop(0, steps, step, None)
                    return acc[...]

                return pl.run_scoped(accumulate, plgpu.ACC((ROWS, rows), F32)) * across_rows(scales)

            def per_group(turn: jax.Array, slab: jax.Array) -> jax.Array:
                """Products of a group are summed apart, then scaled. Scales are loaded one turn of the loop ahead."""
                in_step, groups = depth // group, steps * depth // group
                in_chunk = SCALES // in_step  # steps
                chunks, rest = divmod(steps, in_chunk)

                def fetch(chunk: jax.Array | int) -> list[jax.Array]:
                    at = pl.ds(rank * groups + jnp.minimum(chunk * SCALES, groups - SCALES), SCALES)
                    arrays = [gmem[name].at[slab, :, at] for name in ("scales", "zeros") if name in gmem]
                    return [plgpu.load(array, layout=WG, optimized=False) for array in arrays]

                def add(total: jax.Array, loaded: list[jax.Array], at: jax.Array, values: Any, x_s: Any) -> jax.Array:
                    """total + the groups of a step; the first of them is column `at` of `loaded`."""
                    for i in range(in_step):
                        start, within = divmod(i * group, piece)
                        if within == 0:
                            tile = load(values, start * piece)
                        scales, *zeros = [widen.column(array, at + i, interpret) for array in loaded]
                        x_t = x_s.at[:, pl.ds(i * group, group)].transpose((1, 0))

                        multiplied = functools.partial(multiply, tile=tile, x_t=x_t, first=within, size=group)

                        def product(acc: Any, multiplied: Any = multiplied, zeros: list[Any] = zeros) -> jax.Array:
                            multiplied(acc, zeros=zeros)
                            return acc[...]

                        total += pl.run_scoped(product, plgpu.ACC((ROWS, rows), F32)) * across_rows(scales)
                    return total

                def chunk(c: jax.Array, carry: Any, count: int = in_chunk, skipped: int = 0) -> Any:
                    total, loaded = carry
                    following = fetch(c + 1)

                    def step(i: jax.Array, total: jax.Array) -> jax.Array:
                        values, x_s = arrival(turn, c * in_chunk + i)
                        total = add(total, loaded, skipped + i * in_step, values, x_s)
                        release(turn, c * in_chunk + i)
                        return total

                    return lax.fori_loop(0, count, step, total), following

                carry = plgpu.layout_cast(jnp.zeros((ROWS, rows), F32), WG), fetch(0)
                carry = lax.fori_loop(0, chunks, chunk, carry)
                if rest:
                    carry = chunk(jnp.int32(chunks), carry, rest, SCALES - rest * in_step)
                return carry[0]

            def across_rows(vector: jax.Array) -> jax.Array:
                return lax.broadcast_in_dim(vector, (ROWS, rows), (0,))

            def tile(turn: jax.Array, _: None) -> None:
                row, slab = place(turn)
                total = (per_group if grouped else per_output)(turn, jnp.minimum(slab + wg, slabs - 1))
                if split == 1:
                    store(total, row, slab + wg)
                else:
                    meet(total, row, slab + wg, (cluster + turn * clusters) * consumers + wg)

            def store(total: jax.Array, row: jax.Array, slab: jax.Array) -> None:
                out = smem["out"].at[wg]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out.transpose((1, 0))[...] = plgpu.layout_cast(total.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, gmem["out"].at[pl.ds(row, rows), slab, pl.ds(0, ROWS)])

            def meet(total: jax.Array, row: jax.Array, slab: jax.Array, at: jax.Array) -> None:
                """The first block of the cluster adds the others' sums to its own."""
                sums = gmem["sums"].at[at]

                @pl.when(rank > 0)
                def _send() -> None:
                    sums[rank - 1] = total

                fence()
                plgpu.barrier_arrive(smem["summed"].at[wg])
                plgpu.barrier_wait(smem["summed"].at[wg])
                fence()

                @pl.when(rank == 0)
                def _receive() -> None:
                    whole = total
                    for other in range(split - 1):
                        whole += plgpu.load(sums.at[other], layout=WG, optimized=False)
                    store(whole, row, slab)

            lax.fori_loop(0, turns, tile, None)
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    scratch: dict[str, Any] = {
        "values": plgpu.SMEM(
            (stages, consumers, ROWS, depth // per_byte),
            weight.values.dtype,
            transforms=swizzled(weight.values.dtype, depth // per_byte),
        ),
        "x": plgpu.SMEM((stages, rows, depth), dtype, transforms=swizzled(dtype, group)),
        "out": plgpu.SMEM((consumers, rows, ROWS), out_dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    }
    if not grouped:
        scratch["scales"] = plgpu.SMEM((ring, consumers, ROWS), F32)
        scratch["scaled"] = plgpu.Barrier(num_barriers=ring)
    if interpret is not None:
        scratch["wide"] = plgpu.SMEM((consumers, ROWS, group), dtype, transforms=swizzled(dtype, group))
    by_slab = [
        None if array is None else array.reshape(slabs, height, *array.shape[1:])
        for array in (weight.values, weight.scales, weight.zeros)
    ]
    inputs_g = dict(zip(("x", "values", "scales", "zeros"), (x, *by_slab), strict=True))
    inputs_g = {name: array for name, array in inputs_g.items() if array is not None}
    outputs_g = {"out": jax.ShapeDtypeStruct((padded, slabs, height), out_dtype)}
    if split > 1:
        outputs_g["sums"] = jax.ShapeDtypeStruct((tiles * consumers, split - 1, ROWS, rows), F32)
        scratch["summed"] = plgpu.ClusterBarrier(collective_axes=("split",), num_barriers=consumers)
    names = (*inputs_g, *outputs_g)
    clustered: dict[str, Any] = {"cluster": (split,), "cluster_names": ("split",)} if split > 1 else {}
    out, *_ = plgpu.kernel(
        kernel,
        out_type=tuple(outputs_g.values()),
        grid=(clusters,),
        grid_names=("cluster",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **clustered,
        **interpreted(interpret),
    )(*inputs_g.values())
    return out.reshape(padded, outputs)[:count]
