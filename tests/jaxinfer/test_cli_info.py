"""`jaxinfer info --kernels`: which implementation runs where, and why."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli import main
from pallas_kernels import ops
from pallas_kernels.choice import Decision
from pallas_kernels.target import H200, Target
from tests import tiny


def run(*args: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["info", *args])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(autouse=True)
def decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for Hopper, one that is for nothing."""

    def decide(target: Target) -> list[tuple[str, Decision]]:
        obstacle = target.lacks_hopper()
        made = Decision("paged_decode", "xla" if obstacle else "mosaic", obstacle)
        return [("int8 cache", made), ("64 tokens", Decision("moe", "xla", "it is slow"))]

    monkeypatch.setattr(ops, "decisions", decide)


def test_on_this_machine() -> None:
    lines = run("--kernels").stdout.splitlines()
    assert lines[0] == "On cpu, a CPU, with a layer of Llama-3-8B:"
    reason = "it is written for Hopper GPUs (compute capability 9.0), and this is a CPU"
    assert lines[2] == f"paged_decode     int8 cache                 xla     {reason}"
    assert lines[3] == "moe              64 tokens                  xla     it is slow"


def test_on_a_gpu_that_is_not_here() -> None:
    report = json.loads(run("--kernels", "--gpu", "h200", "--json").stdout)
    assert report["device"] == "h200"
    assert report["kernels"] == [
        {"shapes": "int8 cache", "op": "paged_decode", "implementation": "mosaic", "obstacle": None},
        {"shapes": "64 tokens", "op": "moe", "implementation": "xla", "obstacle": "it is slow"},
    ]
    assert run("--kernels", "--gpu", "h100").stdout.splitlines()[2].endswith("mosaic")
    assert "this is compute capability 8.0" in run("--kernels", "--gpu", "a100").stdout


def test_on_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        platform, compute_capability, core_count = "gpu", "9.0", H200.cores
        device_kind = "NVIDIA H200"

    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr("jax.devices", lambda: [Device])
    assert run("--kernels").stdout.startswith("On NVIDIA H200, compute capability 9.0, with a layer of Llama-3-8B:\n")
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


def test_the_states_of_recurrent_layers(tmp_path) -> None:
    """Float32 of one sequence: memories of 4 heads, and the last 3 inputs of the convolution of 2 key heads."""
    folder = str(tiny.write_checkpoint("qwen3_next", tmp_path))
    state = 4 * (4 * 8 * 12 + 2 * 3 * (8 + 8 + 2 * 12))
    assert f"recurrent       1 of 2 layers keep {state / 1e3} kB a sequence" in run(folder).stdout
    report = json.loads(run(folder, "--json").stdout)
    assert report["state_bytes_per_sequence"] == state
    assert report["kv_bytes_per_token"]["float32"] == 4 * 2 * 2 * 16  # of the one layer that has keys and values
    [fit] = [f for f in report["fits"] if (f["tensor_parallel_size"], f["device_gb"]) == (1, 24)]
    left = 24e9 * 0.9 - report["weight_bytes"]["bfloat16"] - 64 * state
    assert fit["cache_tokens"] == left // report["kv_bytes_per_token"]["bfloat16"]
