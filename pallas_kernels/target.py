"""What a program is compiled for, as far as the choice of implementation depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import jax

HOPPER = (9, 0)


@dataclass(frozen=True)
class Target:
    """A kind of device. Static: it is part of what a program is keyed by."""

    platform: str
    """As in `jax.Device.platform`: "cpu" or "gpu"."""
    compute_capability: tuple[int, int] | None = None
    """Of an NVIDIA GPU: (9, 0) is Hopper."""
    cores: int = 0
    """Streaming multiprocessors of a GPU."""

    @classmethod
    def of(cls, device: jax.Device) -> Target:
        """The target of a device, or of one described by `jax.experimental.topologies`."""
        if device.platform != "gpu":
            return cls(device.platform)
        major, minor = (int(part) for part in device.compute_capability.split("."))
        return cls("gpu", (major, minor), device.core_count)

    def lacks_hopper(self) -> str | None:
        """Why a kernel that uses Hopper's matrix and copy units cannot run here; None if it can."""
        if self.compute_capability == HOPPER:
            return None
        here = "a CPU" if self.platform == "cpu" else f"compute capability {self.compute_capability}"
        return f"it is written for Hopper GPUs (compute capability 9.0), and this is {here}"


CPU = Target("cpu")
H200 = Target("gpu", HOPPER, 132)
"""An H100 SXM, too."""
