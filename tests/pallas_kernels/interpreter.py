"""Kernels on any machine: Mosaic's interpreter with race detection. Uses private modules of jax; tests pin them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GpuClockBundle, GPUSharedMemory, HostAllocationKey
from jax.experimental.pallas import mosaic_gpu as plgpu

MOST_CLUSTERS = 1 << 30


@contextlib.contextmanager
def interpreter() -> Iterator[plgpu.InterpretGPUParams]:
    """For a kernel's `interpret`; AssertionError afterwards if two threads raced, in any kernel that ran inside.

    Block on the results inside.
    """
    kernels = []

    def new_state(*args: Any, original: Any = gpu_callbacks.GPURaceDetectionState, **kwargs: Any) -> Any:
        kernels.append(original(*args, **kwargs))
        return kernels[-1]

    counted = functools.partialmethod(interpret_inline, clocks={})
    multiplied = functools.partial(wgmma, original=gpu_callbacks.wgmma)
    clusters = functools.partial(next, itertools.count())

    def wider(self: Any, size: int, original: Any = GpuClockBundle.__init__) -> None:
        original(self, size + 2)

    def apart(self: Any, *args: Any, original: Any) -> None:
        """Blocks run one after the other here; no clock of one may be before another's unless they synchronized."""
        original(self, *args)
        cluster = clusters()
        for bundle in self.clocks.values():
            for clock in (bundle.generic_clock, bundle.async_smem_clock):
                clock.clock[-2:] = np.maximum(clock.clock[-2:], (cluster, MOST_CLUSTERS - cluster))

    resets = {
        name: getattr(GPUSharedMemory, name) for name in ("update_clocks_for_device_barrier", "reset_per_cluster_state")
    }
    # jax keeps the races of the last kernel only.
    with (
        mock.patch.object(gpu_callbacks, "GPURaceDetectionState", new_state),
        mock.patch.object(gpu_callbacks, "wgmma", multiplied),
        mock.patch.object(jaxpr_interpret.JaxprInterpreter, "_interpret_inline_mgpu_p", counted),
        mock.patch.object(GpuClockBundle, "__init__", wider),
        mock.patch.multiple(
            GPUSharedMemory, **{name: functools.partialmethod(apart, original=f) for name, f in resets.items()}
        ),
    ):
        try:
            yield plgpu.InterpretGPUParams(detect_races=True)
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert kernels, "no kernel ran in the interpreter"
    assert not any(kernel.races_found for kernel in kernels), "the kernel has a data race"


def wgmma(*, original: Any, thread: Any, **args: Any) -> Any:
    """The matrix unit reads shared memory as the copy engine does: what was written since the last `commit_smem` races.

    It is done at once here, so that what overwrites its operands too early is not found.
    """
    memory, races = gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races()
    clock = memory.get_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())  # a reader of its own, neither before nor after its thread
    for operand in "ab":
        key = HostAllocationKey.from_array(args[f"{operand}_allocation_key_as_array"])
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(args[f"{operand}_transforms"]))
        where = memory.access(key, transforms)
        races.check_read(thread, clock.async_smem_clock.copy(), key, where, source_info=args["source_info"])
    with memory.lock:
        memory.clocks[thread].update(clock)
    return original(thread=thread, **args)


def interpret_inline(self: Any, eqn: Any, token: Any, get_values: Any, clocks: dict[Any, Any]) -> tuple[Any, list[Any]]:
    """`paged_decode.counter.count_arrivals`, the one piece of inline PTX whose result counts; the others only order.

    An arrival acquires what earlier ones at this counter released, and releases what it has seen: vector clocks say
    so, and what a kernel reads without having counted is a race. clocks: of each counter, since it was 0.
    """
    if not eqn.outvars:
        return token, []
    name = eqn.params["mgpu_fn"].__qualname__
    assert name == "count_arrivals.<locals>.arrive", f"the interpreter does not know {name}"
    values, count = get_values(), len(eqn.outvars)
    transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], values[2 * count + 1 :])

    def arrive(token: Any, thread: Any, key: Any, transforms: Any, arrivals: Any) -> tuple[Any, np.ndarray]:
        memory, key = gpu_callbacks._get_shared_memory(), HostAllocationKey.from_array(key)
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        where = memory.access(key, transforms)
        # Without a thread: neither a read nor a write that could race.
        if not arrivals:
            return token, np.int32(0)
        before, _, _ = memory.get_buffer_content(key, where, None)
        after = (before + 1) % arrivals
        memory.swap_buffer_content(key, where, after.astype(np.int32), None, None, increment_clock=False)
        mine, place = memory.clocks[thread], (key, str(where))
        if before[0]:
            mine.update(clocks[place])
        clocks[place] = mine.copy()
        memory.incr_clock(thread)
        return token, before[0]

    out = jax.ShapeDtypeStruct((), np.int32)
    found = []
    for i in range(count):
        one = values[i], transforms[i], values[count + 1 + i]
        token, before = callback.io_callback(arrive, (gpu_callbacks.TOKEN_SHAPE_DTYPE, out), token, self.thread, *one)
        found.append(before)
    return token, found
