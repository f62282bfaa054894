"""A counter in global memory, by which the last of several blocks knows that it is the last."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

SCALAR = plgpu.Layout.WG_SPLAT
utils = mgpu.utils


def count_arrival(counter: Any, told: Any, transforms: Any, arrivals: jax.Array) -> jax.Array:
    """How many of `arrivals` came before this one. What those wrote to global memory may be read after the last.

    counter: [1] i32 in global memory, 0 before the first arrival and again after the last. told: anything in shared
    memory, with `transforms`, whose first 4 bytes are free. For a block of one warpgroup.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(transforms), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
    )
    def arrive(_: Any, counter: Any, told: Any, arrivals: Any) -> Any:
        i32 = arrivals.mlir_dtype
        last = utils.inline_ptx("sub.u32 $0, $1, 1;", arrivals.registers.item(), result_types=i32)
        box, fence = utils.memref_ptr(told), "fence.acq_rel.gpu;"
        utils.inline_ptx(fence, has_side_effects=True)  # by every thread, for what it wrote itself
        utils.warpgroup_barrier()
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            # Releases what this block wrote, which the barrier put before it, and acquires what others released.
            add = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"  # 0 after `last`
            before = utils.inline_ptx(add, utils.memref_ptr(counter), last, result_types=i32, has_side_effects=True)
            utils.inline_ptx("st.shared.u32 [$0], $1;", box, before, has_side_effects=True)
        utils.warpgroup_barrier()
        utils.inline_ptx(fence, has_side_effects=True)  # and for what it reads next
        found = utils.inline_ptx("ld.shared.u32 $0, [$1];", box, result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return arrive(counter, told, arrivals)
