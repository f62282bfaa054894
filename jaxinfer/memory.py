"""How much memory the devices have for the cache."""

from __future__ import annotations

import math
import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from meshes import sharding

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The present name of the backend's setting and its former one, which it does not take together."""
CPU_SHARE = 0.25
"""On CPU the cache shares memory with everything else: it takes at most this share of what is free."""

HOLES, HOLE_BYTES = 32, 1 << 18
"""More than the small arrays of the steps in flight, and smaller than any step's temporaries."""


def reserve(memory_fraction: float) -> None:
    """Have a GPU backend that has not started yet set aside just this share of the device. A user's setting wins."""
    if not any(name in os.environ for name in FRACTION_VARIABLES):
        os.environ[FRACTION_VARIABLES[0]] = str(memory_fraction)


def free_bytes(mesh: Mesh, temporaries: int) -> int:
    """Bytes each device of the mesh has left for the cache, besides the temporaries of a step."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        # A power of two, or no two starts would find the same memory free, nor each other's compiled programs.
        return int(2 ** int(math.log2(_free_host_bytes())) * CPU_SHARE / len(devices)) - temporaries
    stats = [device.memory_stats() for device in mesh.local_devices]
    return min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats) - temporaries - 2 * HOLES * HOLE_BYTES


def keep_temporaries_in_place(mesh: Mesh) -> list[jax.Array]:
    """Small holes in the free memory of each GPU, for as long as the arrays returned live, which stand between them.

    XLA writes each node of a CUDA graph anew once its buffers move: some 4 µs each, hundreds in a step. Without holes
    a step's small arrays, its batch and its results, are cut off the one large piece that is free, so that the
    temporaries behind them lie elsewhere in every step. With holes the small arrays lie there, and temporaries stay.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return []
    arrays = [jax.device_put(np.zeros(size, np.int8), sharding(mesh)) for _ in range(HOLES) for size in (HOLE_BYTES, 1)]
    return jax.block_until_ready(arrays)[1::2]


def _free_host_bytes() -> int:
    """Memory free on the host, or in the container, whichever is less."""
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        return min(_free_machine_bytes(), max(1, int(most) - int(used.read_text())))
    return _free_machine_bytes()


def _free_machine_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
