"""Every kernel in its place: prompts in chunks and decode steps through the engine, as on XLA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ATTENTION = {"cache_append", "paged_decode", "rms_norm"}


@pytest.mark.parametrize(
    ("cache_dtype", "quantization", "kernels"),
    [
        ("auto", "none", ATTENTION | {"paged_prefill"}),
        ("int8", "int8", ATTENTION | {"quant_matmul", "norm_projection", "norm_gate_up"}),
    ],
)
def test_equals_xla(cache_dtype, quantization, kernels):
    command = [sys.executable, "-m", "tests.jaxinfer.interpreted_engine", cache_dtype, quantization]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["kernels"]) >= kernels
    for ours, theirs in result["ids"]:
        assert ours == theirs
    # bfloat16 activations of a random model, whose log-probabilities spread by 1.
    assert 0 < result["difference"] < 0.03
