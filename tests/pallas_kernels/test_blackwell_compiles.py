"""Kernels without Hopper's matrix unit compile for Blackwell, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_kernels_that_leave_the_matrix_unit_alone():
    command = [sys.executable, "-m", "tests.pallas_kernels.blackwell_compiles"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"rms_norm", "cache_append bfloat16", "cache_append int8"}
    for [kernel] in found.values():
        assert kernel["spilled_bytes"] == 0
        assert kernel["registers"] <= 128
