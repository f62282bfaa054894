"""What a program is compiled for, as far as the choice of implementation depends on it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax

HOPPER = (9, 0)


@dataclass(frozen=True)
class Target:
    """A kind of device. Static: it is part of what a program is keyed by."""

    platform: str
    """As in `jax.Device.platform`: "cpu" or "gpu"."""
    compute_capability: tuple[int, int] | None = None
    """Of an NVIDIA GPU: (9, 0) is Hopper. None: no such GPU."""
    cores: int = 0
    """Streaming multiprocessors of a GPU."""
    untimed: bool = False
    """Whether kernels run, too, that are right but of which no measurement says yet that they are faster."""

    @classmethod
    def of(cls, device: jax.Device) -> Target:
        """The target of a device, or of one described by `jax.experimental.topologies`."""
        if device.platform != "gpu":
            return cls(device.platform)
        capability = re.fullmatch(r"(\d+)\.(\d+)", device.compute_capability)
        return cls("gpu", capability and (int(capability[1]), int(capability[2])), device.core_count)

    def lacks_hopper(self) -> str | None:
        """Why a kernel that uses Hopper's matrix and copy units cannot run here; None if it can."""
        if self.compute_capability == HOPPER:
            return None
        return f"it is written for Hopper GPUs (compute capability 9.0), and this is {self.described}"

    def lacks_mosaic(self) -> str | None:
        """Why a kernel that leaves those units alone cannot run here; None if it can."""
        if self.compute_capability is not None and self.compute_capability >= HOPPER:
            return None
        return f"it needs an NVIDIA GPU of compute capability 9.0 or more, and this is {self.described}"

    @property
    def described(self) -> str:
        """In a few words, after "this is"."""
        if self.compute_capability is not None:
            return "compute capability {}.{}".format(*self.compute_capability)
        return "a CPU" if self.platform == "cpu" else f"another {self.platform.upper()}"


CPU = Target("cpu")
H200 = Target("gpu", HOPPER, 132)
"""An H100 SXM, too."""
GPUS = {"a100": Target("gpu", (8, 0), 108), "h100": H200, "h200": H200, "b200": Target("gpu", (10, 0), 148)}
"""By name."""
