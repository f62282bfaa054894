"""Which implementation runs where, for all operations at once."""

from __future__ import annotations

from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels import ops
from pallas_kernels.target import CPU, GPUS, H200

FOLDERS = {path.parent.name for path in Path(pallas_kernels.__file__).parent.glob("*/api.py")}
PARTS = {"gate_up": "fused_mlp", "down": "fused_mlp", "norm_projection": "norm_matmul", "norm_gate_up": "norm_matmul"}
"""Operations that choose for themselves within a folder."""


@pytest.mark.parametrize(("target", "name"), [(CPU, "a CPU"), (GPUS["a100"], "compute capability 8.0")])
def test_elsewhere_plain_jax_runs_and_says_why(target, name):
    decisions = [decision for _, decision in ops.decisions(target)]
    assert {PARTS.get(decision.op, decision.op) for decision in decisions} == FOLDERS, "every operation is shown"
    for decision in decisions:
        assert decision.implementation == "xla"
        assert decision.obstacle.endswith(f"this is {name}")


def test_on_hopper_kernels_run_where_they_win():
    decisions = [decision for _, decision in ops.decisions(H200)]
    kernels = {PARTS.get(d.op, d.op) for d in decisions if d.implementation == "mosaic"}
    assert {"cache_append", "fused_mlp", "moe"} <= kernels <= FOLDERS
    assert all(decision.obstacle for decision in decisions if decision.implementation == "xla")
