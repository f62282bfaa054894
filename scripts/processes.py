"""Work that compiling dominates, shared by processes on one GPU: tracing and compiling hold Python's lock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def share(script: Path, arguments: Sequence[str], count: int) -> list[int]:
    """Exit statuses of `count` processes of the script, each with `--processes count --part n`, n from 0."""
    command = [sys.executable, str(script), *arguments, "--processes", str(count), "--part"]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"  # speed does not matter
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    processes = [subprocess.Popen([*command, str(part)], env=environment) for part in range(count)]
    return [process.wait() for process in processes]
