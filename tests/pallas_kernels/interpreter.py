"""Kernels on any machine: Mosaic's interpreter with race detection. Uses a private module of jax; a test pins it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextlib.contextmanager
def interpreter() -> Iterator[plgpu.InterpretGPUParams]:
    """For a kernel's `interpret`; AssertionError afterwards if two threads raced. Block on the results inside."""
    try:
        yield plgpu.InterpretGPUParams(detect_races=True)
        races = interpret_pallas_call.get_races()
        assert races is not None, "no kernel ran in the interpreter"
        assert not races.races_found, "the kernel has a data race"
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
