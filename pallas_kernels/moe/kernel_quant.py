"""Grouped matmul in Mosaic GPU for few rows an expert and weights of 8 or 4 bits, which are widened in registers.

As in kernel_decode operands are swapped, a producer keeps a ring of weight tiles in flight, and consumers have 64
columns each of gate and up, or of a plain product. The weights are stored with their inputs innermost, as the first
operand of a matrix unit wants them from registers. A scale per column multiplies the sum; int4 and mxfp4 have one per
group of inputs, whose products are summed apart.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import QuantizedArray
from pallas_kernels.fused_mlp.activations import activate, erf
from pallas_kernels.moe.config import LANES, MOST_SCALES, DecodeConfig
from pallas_kernels.moe.plan import Plan
from pallas_kernels.moe.work import for_units, locate
from pallas_kernels.mosaic import interpreted, swizzled
from pallas_kernels.quant_matmul import widen
from pallas_kernels.quant_matmul.widen import PER_ROW, WG

F32 = jnp.float32


def quant_rows(
    x: jax.Array,
    weight: QuantizedArray,
    bias: jax.Array | None,
    plan: Plan,
    config: DecodeConfig,
    *,
    activation: str | None,
    interpret: Any = None,
) -> jax.Array:
    """Shapes as in `kernel_decode.decode_rows`; weight: of [experts, inputs, pieces * width]."""
    rows, inputs = x.shape
    pieces = 1 if activation is None else 2
    width = weight.outputs[1] // pieces
    consumers, splits, depth, stages = config.consumers, config.splits, config.depth, config.stages
    columns, steps = width // (LANES * consumers), inputs // (depth * splits)
    grouped = weight.group_size is not None
    per_byte, group = (2, weight.group_size or depth) if grouped else (1, depth)
    in_step = depth // group
    tile, dtype, stored = plan.tile, x.dtype, weight.values.dtype

    def kernel(*refs: Any) -> None:
        gmem, sm = dict(zip(names, refs, strict=False)), refs[-1]
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        live = gmem["live"][0]
        units = live * (columns * splits)

        def place(unit: jax.Array) -> tuple[jax.Array, ...]:
            """(split, row tile, first column, expert)"""
            split, rest = lax.rem(unit, splits), lax.div(unit, splits)
            row, column = locate(rest, live, columns, config.band)
            return split, row, column * (LANES * consumers), gmem["experts"][row]

        def produce() -> None:
            if config.registers is not None:
                plgpu.set_max_registers(40, action="decrease")

            def unit(u: jax.Array, count: jax.Array) -> jax.Array:
                split, row, column, expert = place(u)

                def load(j: jax.Array, count: jax.Array) -> jax.Array:
                    slot = lax.rem(count, stages)

                    @pl.when(count >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(sm["free"].at[slot])

                    step, size, full = split * steps + j, depth // per_byte, sm["full"].at[slot]
                    at = pl.ds(pl.multiple_of(step * size, size), size)
                    for piece in range(pieces):
                        out = pl.ds(pl.multiple_of(column + piece * width, LANES), LANES * consumers)
                        plgpu.copy_gmem_to_smem(gmem["values"].at[expert, out, at], sm["values"].at[slot, piece], full)
                    at = pl.ds(pl.multiple_of(step * depth, depth), depth)
                    mine = pl.ds(pl.multiple_of(row * tile, tile), tile)
                    plgpu.copy_gmem_to_smem(gmem["x"].at[mine, at], sm["x"].at[slot], full)
                    return count + 1

                return lax.fori_loop(0, steps, load, count)

            count = for_units(block, config.blocks, units, unit, jnp.int32(0))
            for s in range(stages):  # the interpreter insists that every phase is observed

                @pl.when(count > s)
                def _(s: int = s) -> None:
                    plgpu.barrier_wait(sm["free"].at[lax.rem(count - 1 - s, stages)])

        def consume() -> None:
            if config.registers is not None:
                plgpu.set_max_registers(config.registers, action="increase")

            mine = pl.ds(pl.multiple_of(wg * LANES, LANES), LANES)

            def across(vector: jax.Array) -> jax.Array:
                return lax.broadcast_in_dim(vector, (LANES, tile), (0,))

            def multiply(acc: Any, stored: jax.Array, x_t: Any, first: int, zeros: jax.Array | None, at: int) -> None:
                """acc += one group of a step, from input `first` on."""
                options: dict[str, Any] = {"first": first, "inputs": group, "zeros": zeros, "interpret": interpret}
                wide = widen.widen(stored, weight.format, dtype, **options)
                if interpret is not None:  # whose wgmma takes no registers
                    sm["wide"].at[wg, at][...] = wide
                    plgpu.commit_smem()
                    wide = sm["wide"].at[wg, at]
                plgpu.wgmma(acc, wide, x_t)

            def in_slot(count: jax.Array, body: Any) -> Any:
                slot = lax.rem(count, stages)
                plgpu.barrier_wait(sm["full"].at[slot])
                layout = widen.layout(weight.format)
                out = body([plgpu.load(sm["values"].at[slot, p, mine], layout=layout) for p in range(pieces)], slot)
                plgpu.barrier_arrive(sm["free"].at[slot])
                return out

            def per_column(count: jax.Array, expert: jax.Array, outs: list[Any], split: jax.Array) -> list[jax.Array]:
                def product(*accs: Any) -> list[jax.Array]:
                    def body(tiles: list[jax.Array], slot: jax.Array) -> None:
                        for p, acc in enumerate(accs):
                            multiply(acc, tiles[p], sm["x"].at[slot].transpose((1, 0)), 0, None, p)
                        plgpu.wgmma_wait(0)

                    lax.fori_loop(0, steps, lambda i, _: in_slot(count + i, body), None)
                    return [acc[...] for acc in accs]

                sums = pl.run_scoped(product, *[plgpu.ACC((LANES, tile), F32)] * pieces)
                scales = [plgpu.load(gmem["scales"].at[expert, out], layout=PER_ROW, optimized=False) for out in outs]
                return [total * across(scale) for total, scale in zip(sums, scales, strict=True)]

            def per_group(count: jax.Array, expert: jax.Array, outs: list[Any], split: jax.Array) -> list[jax.Array]:
                """Scales are loaded one turn of the loop ahead."""
                groups, in_chunk = steps * in_step, MOST_SCALES // in_step
                last = max(groups, MOST_SCALES) - MOST_SCALES  # where the last chunk's scales begin
                chunks, rest = divmod(steps, in_chunk)
                kinds = [name for name in ("scales", "zeros") if name in gmem]

                def fetch(chunk: jax.Array | int) -> list[list[jax.Array]]:
                    at = pl.ds(split * groups + jnp.minimum(chunk * MOST_SCALES, last), MOST_SCALES)
                    refs = [[gmem[name].at[expert, out, at] for name in kinds] for out in outs]
                    return [[plgpu.load(ref, layout=WG, optimized=False) for ref in kinds] for kinds in refs]

                def add(
                    totals: list[jax.Array], loaded: Any, first: jax.Array, tiles: Any, slot: jax.Array
                ) -> list[jax.Array]:
                    """totals + the groups of a step; the first of them is column `first` of `loaded`."""
                    for i in range(in_step):
                        x_t = sm["x"].at[slot, :, pl.ds(i * group, group)].transpose((1, 0))
                        factors = [[widen.column(a, first + i, interpret) for a in arrays] for arrays in loaded]

                        def product(*accs: Any, i: int = i, x_t: Any = x_t, factors: Any = factors) -> list[jax.Array]:
                            for p, acc in enumerate(accs):
                                zeros = factors[p][1] if len(kinds) > 1 else None
                                multiply(acc, tiles[p], x_t, i * group, zeros, p)
                            return [acc[...] for acc in accs]

                        sums = pl.run_scoped(product, *[plgpu.ACC((LANES, tile), F32)] * pieces)
                        totals = [t + s * across(f[0]) for t, s, f in zip(totals, sums, factors, strict=True)]
                    return totals

                def chunk(c: jax.Array, carry: Any, turns: int = in_chunk, skipped: int = 0) -> Any:
                    totals, loaded = carry
                    following = fetch(c + 1)

                    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
                        at = skipped + i * in_step
                        return in_slot(
                            count + c * in_chunk + i, lambda tiles, slot: add(totals, loaded, at, tiles, slot)
                        )

                    return lax.fori_loop(0, turns, step, totals), following

                zero = plgpu.layout_cast(jnp.zeros((LANES, tile), F32), WG)
                carry = lax.fori_loop(0, chunks, chunk, ([zero] * pieces, fetch(0)))
                if rest:
                    carry = chunk(jnp.int32(chunks), carry, rest, chunks * MOST_SCALES - last)
                return carry[0]

            def unit(u: jax.Array, count: jax.Array) -> jax.Array:
                split, row, column, expert = place(u)
                first = column + wg * LANES
                outs = [pl.ds(pl.multiple_of(first + p * width, LANES), LANES) for p in range(pieces)]
                sums = (per_group if grouped else per_column)(count, expert, outs, split)
                if "bias" in gmem:
                    biases = [plgpu.load(gmem["bias"].at[expert, out], layout=PER_ROW, optimized=False) for out in outs]
                    sums = [total + across(bias.astype(F32)) for total, bias in zip(sums, biases, strict=True)]
                total = sums[0] if activation is None else activate(activation, sums[0], sums[1], erf=erf)
                mine = pl.ds(pl.multiple_of(row * tile, tile), tile)
                out = gmem["out"].at[split, mine, outs[0]].transpose((1, 0))
                out[...] = plgpu.layout_cast(total.astype(out_type.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                return count + steps

            for_units(block, config.blocks, units, unit, jnp.int32(0))

        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)

    scratch: dict[str, Any] = {
        "values": plgpu.SMEM(
            (stages, pieces, LANES * consumers, depth // per_byte),
            stored,
            transforms=swizzled(stored, depth // per_byte),
        ),
        "x": plgpu.SMEM((stages, tile, depth), dtype, transforms=swizzled(dtype, group)),
        "full": plgpu.Barrier(num_arrivals=pieces + 1, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    }
    if interpret is not None:
        scratch["wide"] = plgpu.SMEM((consumers, pieces, LANES, group), dtype, transforms=swizzled(dtype, group))
    out_type = jax.ShapeDtypeStruct((splits, rows, width), F32 if activation is None else dtype)
    operands = {"x": x, "values": weight.values, "scales": weight.scales, "zeros": weight.zeros, "bias": bias}
    operands |= {"experts": plan.tile_experts, "live": plan.live}
    operands = {name: array for name, array in operands.items() if array is not None}
    names = (*operands, "out")
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(config.blocks,),
        kernel_name="moe",
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="wg",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        **interpreted(interpret),
    )(*operands.values())
