"""Kernels on any machine: Mosaic's interpreter with race detection. Uses a private module of jax; a test pins it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def interpreter() -> Iterator[plgpu.InterpretGPUParams]:
    """For a kernel's `interpret`; AssertionError afterwards if two threads raced, in any kernel that ran inside.

    Block on the results inside.
    """
    kernels = []

    def new_state(*args: Any, original: Any = gpu_callbacks.GPURaceDetectionState, **kwargs: Any) -> Any:
        kernels.append(original(*args, **kwargs))
        return kernels[-1]

    # jax keeps the races of the last kernel only.
    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", new_state):
        try:
            yield plgpu.InterpretGPUParams(detect_races=True)
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert kernels, "no kernel ran in the interpreter"
    assert not any(kernel.races_found for kernel in kernels), "the kernel has a data race"
