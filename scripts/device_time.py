"""Time on the GPU itself, kernel by kernel, by CUPTI. Launch gaps are not counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.lib import mosaic_gpu  # the public profiler jits what it is given, and folds its arguments to constants


def kernel_times(call: Callable[[int], Any], repeats: int = 16) -> list[float]:
    """Median microseconds of each kernel that `call(i)` launches; `call` gets 0, 1, … and launches the same each time.

    Call something compiled with different arguments in turn, so that no turn finds its data in the L2 cache.
    What one call returns may be donated to a later one. Raises RuntimeError if the number of kernels varies.
    """
    _wait_for_last(call, 2)
    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        _wait_for_last(call, repeats)
    finally:  # else nothing could be timed after a failure
        times = cupti._cupti_get_timings(True)
    if not times or len(times) % repeats:
        raise RuntimeError(f"{len(times)} kernels in {repeats} calls: not the same number in each")
    milliseconds = np.array([time for _, time in times]).reshape(repeats, -1)
    return [float(x) * 1e3 for x in np.median(milliseconds, axis=0)]


def _wait_for_last(call: Callable[[int], Any], count: int) -> None:
    """A GPU does one call after another: the last one's end is the end of all."""
    for i in range(count):
        outputs = call(i)
    jax.block_until_ready(outputs)


def microseconds(call: Callable[[int], Any], repeats: int = 16) -> float:
    """Median microseconds of all kernels of one call together."""
    return sum(kernel_times(call, repeats))


def read_ceiling() -> float:
    """Bytes a second this GPU reads at most: row sums over 2 GiB of bfloat16, in turns over two arrays."""
    arrays = [jax.random.normal(jax.random.key(i), (1 << 17, 8192), jax.numpy.bfloat16) for i in range(2)]
    sums = jax.jit(lambda x: x.astype(jax.numpy.float32).sum(1))
    return arrays[0].nbytes / microseconds(lambda i: sums(arrays[i % 2]), 8) * 1e6


def matmul_ceiling() -> float:
    """bfloat16 operations a second this GPU does at most: cuBLAS on 8192 cubed."""
    x, y = (jax.random.normal(jax.random.key(i), (8192, 8192), jax.numpy.bfloat16) for i in range(2))
    product = jax.jit(lambda x, y: x @ y)
    return 2 * 8192**3 / microseconds(lambda i: product(x, y), 8) * 1e6
