"""The CUDA plugin without a GPU: quiet where it can only compile, untouched where it may run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxinfer.cli import cuda

AOT = {"jax_plugins.xla_cuda13"}
"""What the `aot` extra installs, of the modules that count."""


def platforms(monkeypatch, dev, installed=AOT, **environ):
    monkeypatch.setattr(cuda, "_installed", installed.__contains__)
    cuda.skip_unusable_cuda(environ, dev)
    return environ.get("JAX_PLATFORMS")


def test_the_cpu_where_the_plugin_can_only_compile(monkeypatch, tmp_path):
    assert platforms(monkeypatch, tmp_path) == "cpu"
    assert platforms(monkeypatch, tmp_path, JAX_PLATFORMS="") == "cpu"


@pytest.mark.parametrize("device", ["nvidiactl", "nvidia0", "nvidia12", "dxg"])
def test_a_gpu_is_left_alone(monkeypatch, tmp_path, device):
    (tmp_path / device).touch()
    assert platforms(monkeypatch, tmp_path) is None


def test_other_devices_are_no_gpu(monkeypatch, tmp_path):
    (tmp_path / "nvram").touch()
    assert platforms(monkeypatch, tmp_path) == "cpu"


def test_cudnn_means_that_a_gpu_is_wanted(monkeypatch, tmp_path):
    """JAX says what is wrong with it."""
    assert platforms(monkeypatch, tmp_path, {*AOT, "nvidia.cudnn"}) is None


def test_without_the_plugin_nothing_is_done(monkeypatch, tmp_path):
    assert platforms(monkeypatch, tmp_path, set()) is None


def test_a_platform_that_was_chosen_stays(monkeypatch, tmp_path):
    assert platforms(monkeypatch, tmp_path, JAX_PLATFORMS="cuda") == "cuda"


@pytest.mark.parametrize(("module", "there"), [("json.decoder", True), ("json.no", False), ("no_package.no", False)])
def test_installed(module, there):
    assert cuda._installed(module) is there


AS_BY_AOT = """
from jaxinfer.cli import cuda, main
cuda.DEVICES = ()
cuda._installed = lambda module: module in cuda.PLUGINS
main(["env"])
"""


def test_a_command_is_quiet():
    """With the development tools installed and no GPU, as in `make demo`."""
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", AS_BY_AOT], capture_output=True, text=True, check=True, env=environ)
    assert done.stderr == ""
    assert "device 0           cpu: cpu" in done.stdout
