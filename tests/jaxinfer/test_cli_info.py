"""`jaxinfer info --kernels`: which implementation runs where, and why."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli import main
from pallas_kernels import ops
from pallas_kernels.target import H200


def run(*args: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["info", *args])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(autouse=True)
def obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is for Hopper, but the one of moe, which is for nothing."""
    monkeypatch.setattr(ops, "obstacle", lambda op, target: "it is new" if op == "moe" else target.lacks_hopper())


def test_on_this_machine() -> None:
    lines = run("--kernels").stdout.splitlines()
    assert lines[0] == "On cpu, a CPU:"
    assert lines[1].split() == ["operation", "runs", "because"]
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines[2:]}
    assert tuple(rows) == ops.OPS
    reason = "of the kernel: it is written for Hopper GPUs (compute capability 9.0), and this is a CPU"
    assert rows["paged_decode"] == ["xla", reason]
    assert rows["moe"] == ["xla", "of the kernel: it is new"]


def test_on_a_gpu_that_is_not_here() -> None:
    report = json.loads(run("--kernels", "--gpu", "h200", "--json").stdout)
    assert report["device"] == "h200"
    kernels = {row["op"]: row for row in report["kernels"]}
    assert kernels["paged_decode"] == {"op": "paged_decode", "obstacle": None, "implementation": "mosaic"}
    assert kernels["moe"] == {"op": "moe", "obstacle": "it is new", "implementation": "xla"}
    assert "paged_decode   mosaic  the kernel runs here" in run("--kernels", "--gpu", "h100").stdout
    assert "this is compute capability 8.0" in run("--kernels", "--gpu", "a100").stdout


def test_on_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        platform, compute_capability, core_count = "gpu", "9.0", H200.cores
        device_kind = "NVIDIA H200"

    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr("jax.devices", lambda: [Device])
    assert run("--kernels").stdout.startswith("On NVIDIA H200, compute capability 9.0:\n")
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false", "asking does not take the memory"


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ([], 2, "Name either a PATH or --kernels"),
        (["model", "--kernels"], 2, "Name either a PATH or --kernels"),
        (["model", "--gpu", "h200"], 2, "--gpu goes with --kernels"),
        (["--kernels", "--gpu", "h2000"], 1, "'h2000' is not a GPU known here; there are: a100, h100, h200, b200"),
    ],
)
def test_misuse_is_explained(args: list[str], status: int, message: str) -> None:
    assert message in run(*args, status=status).output
