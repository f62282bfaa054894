"""JAX's CUDA plugin, where it is installed only to compile for GPUs elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import MutableMapping
from pathlib import Path

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
DEVICES = ("nvidiactl", "nvidia[0-9]*", "dxg")
"""What an NVIDIA GPU is called in /dev; the last one under Windows."""


def skip_unusable_cuda(environ: MutableMapping[str, str], dev: Path = Path("/dev")) -> None:
    """Name the CPU as JAX's platform if the plugin is there with neither a GPU nor cuDNN, as the `aot` extra leaves it.

    JAX would run on the CPU just the same, after a traceback. Where there is a GPU, or cuDNN was installed to use one,
    nothing is done, so that JAX tells what is wrong. A platform that was chosen stays. Call it before importing jax.
    """
    if environ.get("JAX_PLATFORMS") or not any(map(_installed, PLUGINS)) or _installed("nvidia.cudnn"):
        return
    if not any(any(dev.glob(pattern)) for pattern in DEVICES):
        environ["JAX_PLATFORMS"] = "cpu"


def _installed(module: str) -> bool:
    """Whether a submodule is there; imports no more than the empty package it is in."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing, too
        return False
