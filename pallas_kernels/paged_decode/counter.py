"""Counters in global memory, by which the last of several blocks knows that it is the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

SCALAR = plgpu.Layout.WG_SPLAT
FENCE = "fence.acq_rel.gpu;"
ADD = """{
    .reg .pred some; .reg .u32 before;
    mov.u32 before, 0;
    setp.ne.u32 some, $2, 0xffffffff;
    @some atom.relaxed.gpu.global.inc.u32 before, [$1], $2;
    mov.u32 $0, before;
}"""
"""0 after `$2`; nothing if that is -1."""
utils = mgpu.utils


def count_arrivals(
    counters: Sequence[Any], told: Any, transforms: Any, arrivals: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """At each counter, how many of `arrivals` came before this one. What those wrote to global memory may be read after
    the last. 0 arrivals: this one does not count there, and 0 came before.

    counters: [1] i32 each in global memory, 0 before the first arrival and again after the last. told: anything in
    shared memory, with `transforms`, whose first bytes, 4 for each counter, are free. For a block of one warpgroup.
    """
    each = range(len(counters))

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType() for _ in each], plgpu.RefType(transforms), [SCALAR for _ in each]),
        return_type=[plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR) for _ in each],
    )
    def arrive(_: Any, counters: Any, told: Any, arrivals: Any) -> Any:
        i32, box = arrivals[0].mlir_dtype, utils.memref_ptr(told)
        places = ["[$0]" if i == 0 else f"[$0 + {4 * i}]" for i in each]
        lasts = [utils.inline_ptx("sub.u32 $0, $1, 1;", n.registers.item(), result_types=i32) for n in arrivals]
        utils.inline_ptx(FENCE, has_side_effects=True)  # by every thread, for what it wrote itself
        utils.warpgroup_barrier()
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            # Releases what this block wrote, which the barrier put before it, and acquires what others released.
            utils.inline_ptx(FENCE, has_side_effects=True)
            before = [
                utils.inline_ptx(ADD, utils.memref_ptr(counter), last, result_types=i32, has_side_effects=True)
                for counter, last in zip(counters, lasts, strict=True)
            ]
            utils.inline_ptx(FENCE, has_side_effects=True)
            for place, x in zip(places, before, strict=True):
                utils.inline_ptx(f"st.shared.u32 {place}, $1;", box, x, has_side_effects=True)
        utils.warpgroup_barrier()
        utils.inline_ptx(FENCE, has_side_effects=True)  # and for what it reads next
        found = [
            utils.inline_ptx(
                f"ld.shared.u32 $0, {place.replace('$0', '$1')};", box, result_types=i32, has_side_effects=True
            )
            for place in places
        ]
        return [mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found]

    return arrive(list(counters), told, list(arrivals))
