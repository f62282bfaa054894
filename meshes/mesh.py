"""The mesh: four named axes, size 1 where unused."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "pipe", "expert", "tensor")


def build_mesh(
    data: int = 1, pipe: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh over the first data · pipe · expert · tensor devices (of `jax.devices()` unless given).

    Tensor is the innermost axis: its collectives are the most frequent, so its devices are neighbours.
    Raises ValueError if there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = (data, pipe, expert, tensor)
    needed = int(np.prod(shape))
    if needed > len(devices):
        sizes = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"a mesh of {sizes} needs {needed} devices, and there are {len(devices)} ({devices[0].platform}); "
            "lower the parallel sizes, or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=N"
        )
    return Mesh(np.asarray(devices[:needed]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
