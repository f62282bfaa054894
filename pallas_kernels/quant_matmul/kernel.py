"""x times a weight of 8 or 4 bits: a Mosaic GPU kernel for Hopper that widens weights in registers.

Operands are swapped, out^T = W x^T: outputs fill the 64 rows that wgmma demands, and the rows of x are its N, as few as
8. A block is one producer warpgroup, which loads tiles of the weight and of x by TMA into a ring of shared memory, and
consumers, which read their part of the weight into registers, widen it and multiply. Each has 64 outputs, or several
share them, every `ways`-th piece of the inputs each: where outputs are few, all of the GPU has work, and sums meet in
shared memory. So do gate and up projections, for the activation. Blocks are persistent: the next tile's loads are
under way while a tile ends. The blocks of a cluster share the inputs of a tile (`split`); their sums
meet in global memory, the L2 cache. Where x has 8 bits, too, nothing is widened: matrix units read both from shared
memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import QuantizedArray, QuantizedRows
from pallas_kernels.mosaic import interpreted, swizzled
from pallas_kernels.quant_matmul.block import LINE, Block, Cut
from pallas_kernels.quant_matmul.config import Config, row_scales
from pallas_kernels.quant_matmul.finish import Combine, consume
from pallas_kernels.quant_matmul.produce import produce
from pallas_kernels.quant_matmul.widen import ROWS
from pallas_kernels.rms_norm.fold import Fold, Norm

F32 = jnp.float32
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""A thread, of one producer and two consumers, where sums take more than the 168 of an even split."""


def quant_matmul(
    x: jax.Array | QuantizedRows,
    weight: QuantizedArray,
    out_dtype: Any,
    config: Config,
    combine: Combine | None = None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """x: [rows, inputs] bf16 or f16, or in the weight's 8 bits; weight: of [outputs, inputs]. Returns [rows, outputs].

    config: as `config.choose` cuts it.

    combine: from the f32 sums of the first half of the outputs and of the second to what is returned, then only half.
    """
    return normed(x, None, weight, out_dtype, config, combine, interpret=interpret)["out"]


def normed(
    x: jax.Array | QuantizedRows,
    norm: Norm | None,
    weight: QuantizedArray,
    out_dtype: Any,
    config: Config,
    combine: Combine | None = None,
    *,
    interpret: Any = None,
) -> dict[str, jax.Array]:
    """The same product of the norm of x, if there is one: `out`, and x + norm.delta, `total`, if there is a delta.

    x: 16 bits and at most `fold.MOST_ROWS` rows then.
    """
    if combine is not None and config.split > 1:
        raise ValueError(f"split is {config.split}; blocks that share inputs cannot combine halves: it must be 1")
    count, inputs = x.shape
    values, row_scales = (x.values, x.scales) if isinstance(x, QuantizedRows) else (x, None)
    parts = 1 if combine is None else 2
    outputs, height, dtype = weight.outputs[0] // parts, config.height, values.dtype
    cut = Cut(
        config=config,
        count=count,
        inputs=inputs,
        slabs=outputs // height,
        parts=parts,
        format=weight.format,
        group=weight.group_size or min(config.depth, LINE),
        dtype=dtype,
        out_dtype=out_dtype,
        interpret=interpret,
        fold=None if norm is None else Fold(norm, values, count, config.consumers // config.ways),
    )
    # The copy engine takes rows in eights, or all of them.
    padded = count if count < 8 else pl.cdiv(count, 8) * 8
    values = jnp.pad(values, ((0, padded - count), (0, 0)))
    by_slab = [
        None if array is None else array.reshape(parts * cut.slabs, height, *array.shape[1:])
        for array in (weight.values, weight.scales, weight.zeros)
    ]
    given = dict(zip(("x", "row_scales", "values", "scales", "zeros"), (values, row_scales, *by_slab), strict=True))
    given = {name: array for name, array in given.items() if array is not None}
    made = {"out": jax.ShapeDtypeStruct((padded, cut.slabs, height), out_dtype)}
    if cut.fold is not None:
        given |= cut.fold.given
        made |= cut.fold.made
    if config.split > 1:
        shape = (cut.tiles * cut.taken, config.split - 1, ROWS, config.rows)
        made["sums"] = jax.ShapeDtypeStruct(shape, F32)
    names = (*given, *made)

    def kernel(*refs: Any) -> None:
        wg = lax.axis_index("wg")
        rank = lax.axis_index("split") if config.split > 1 else jnp.int32(0)
        gmem = dict(zip(names, refs, strict=False))
        block = Block(cut, gmem, refs[-1], lax.axis_index("cluster"), rank)
        wide = config.rows > 64 and config.consumers == 2

        @pl.when(wg == config.consumers)
        def _produce() -> None:
            if wide:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            produce(block)

        @pl.when(wg < config.consumers)
        def _consume() -> None:
            if wide:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            consume(block, wg, combine)

    clustered: dict[str, Any] = {"cluster": (config.split,), "cluster_names": ("split",)} if config.split > 1 else {}
    results = plgpu.kernel(
        kernel,
        out_type=tuple(made.values()),
        grid=(cut.clusters,),
        grid_names=("cluster",),
        num_threads=config.consumers + 1,
        thread_name="wg",
        scratch_types=[scratch(cut, weight.values.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **clustered,
        **interpreted(interpret),
    )(*given.values())
    results = dict(zip(made, results, strict=True))
    return {**results, "out": results["out"].reshape(padded, outputs)[:count]}


def scratch(cut: Cut, stored_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a block."""
    config, stored = cut.config, cut.config.depth // cut.per_byte
    rows, stages, slabs = config.rows, config.stages, cut.parts * cut.taken
    loads = cut.parts + 1 + (0 if cut.fold is None else len(cut.fold.given))
    refs: dict[str, Any] = {
        "values": plgpu.SMEM(
            (stages, config.ways, slabs, ROWS, stored), stored_dtype, transforms=swizzled(stored_dtype, stored)
        ),
        "x": plgpu.SMEM(
            (stages, config.ways, rows, config.depth), cut.dtype, transforms=swizzled(cut.dtype, cut.group)
        ),
        "out": plgpu.SMEM((cut.taken, rows, ROWS), cut.out_dtype),
        "full": plgpu.Barrier(num_arrivals=config.ways * loads, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=stages),
    }
    if not cut.grouped:
        refs["scales"] = plgpu.SMEM((cut.ring, slabs, ROWS), F32)
        refs["scaled"] = plgpu.Barrier(num_arrivals=cut.parts + cut.narrow, num_barriers=cut.ring)
    if cut.narrow:
        refs["row_scales"] = plgpu.SMEM((cut.ring, row_scales(rows)), F32)
    if cut.fold is not None:
        refs |= cut.fold.scratch(rows, (stages, config.ways), config.depth, cut.group)
    if cut.members > 1:
        others = cut.members - 1
        refs["sums"] = plgpu.SMEM((cut.taken * others, ROWS, rows), F32, transforms=swizzled(F32, rows))
        refs["sent"] = plgpu.Barrier(num_arrivals=others, num_barriers=cut.taken)
        refs["read"] = plgpu.Barrier(num_barriers=cut.taken)
    if config.split > 1:
        refs["summed"] = plgpu.ClusterBarrier(collective_axes=("split",), num_barriers=cut.taken)
    if cut.interpret is not None and not cut.narrow:
        refs["wide"] = plgpu.SMEM(
            (config.consumers, ROWS, cut.group), cut.dtype, transforms=swizzled(cut.dtype, cut.group)
        )
    return refs
