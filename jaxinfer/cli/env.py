"""`jaxinfer env`: what a bug report needs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import click

from jaxinfer.cli.common import Command

PACKAGES = (
    "jaxinfer",
    "jax",
    "jaxlib",
    "flax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
)
CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
VARIABLES = (
    "JAX_",
    "JAXINFER_",
    "XLA_",
    "NCCL_",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH",
)
"""Starts of the names of the environment variables that change results."""
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def env(as_json: bool) -> None:
    """Print versions, devices and settings: what a bug report needs. No secrets.

    \b
    Example:
      jaxinfer env
    """
    report = {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
        "cuda": cuda_versions(),
        "variables": variables(os.environ),
        "devices": devices(),
    }
    if as_json:
        click.echo(json.dumps(report))
        return
    for name in ("python", "platform"):
        click.echo(f"{name:<18} {report[name]}")
    for section in ("packages", "cuda", "variables"):
        values = report[section]
        assert isinstance(values, dict)
        for name, value in values.items():
            click.echo(f"{name:<18} {value}")
    for number, device in enumerate(report["devices"]):
        click.echo(f"{f'device {number}':<18} {device}")


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cuda_versions() -> dict[str, str]:
    """The CUDA packages that are installed, and the driver's version where there is one."""
    installed = {name: version(name) for name in CUDA_PACKAGES if version(name) != "not installed"}
    if not shutil.which("nvidia-smi"):
        return installed
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    return {**installed, "NVIDIA driver": lines[0] if lines else f"nvidia-smi failed with status {done.returncode}"}


def variables(environ: Any) -> dict[str, str]:
    """Those of the variables in `environ` that change results, never one whose name sounds like a secret."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(VARIABLES) and not any(word in name.upper() for word in SECRETS)
    }


def devices() -> list[str]:
    """One line per device: its kind and memory limit; or why JAX has none."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # asking must not take the memory
    import jax

    try:
        found = jax.devices()
    except RuntimeError as error:  # a broken driver is just what a report is for
        return [f"JAX found none: {error}"]
    return [f"{device.platform}: {device.device_kind}{_memory(device)}" for device in found]


def _memory(device: Any) -> str:
    stats = device.memory_stats()
    return f", {stats['bytes_limit'] / 1e9:.1f} GB usable" if stats and "bytes_limit" in stats else ""
