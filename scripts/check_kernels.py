"""Is each kernel right on this GPU, in every option?

    python scripts/check_kernels.py [--only PATTERN]

Small cases against float32; exit status 1 if one is wrong or fails. (For speed: scripts/bench_kernels.py.)
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.kernel_checks import Check, checks
from scripts.kernels.stages import row_error
from scripts.processes import share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="checks whose name holds this regular expression")
    parser.add_argument("--processes", type=int, default=6, help="that share the work, and the GPU (default 6)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    chosen = [check for check in checks() if re.search(args.only, check.name)]
    if not chosen:
        parser.error(f"no check has a name like {args.only!r}")
    start, count = time.perf_counter(), min(args.processes, len(chosen))
    if args.part is None and count > 1:
        failures = sum(share(Path(__file__), ["--only", args.only], count))
        print(f"{len(chosen)} checks in {time.perf_counter() - start:.0f} s: {'WRONG' if failures else 'all right'}")
    else:
        mine = chosen[args.part or 0 :: count]
        with ThreadPoolExecutor() as pool:
            right = [report(check, *result) for check, result in zip(mine, pool.map(run, mine), strict=True)]
        failures = len(mine) - sum(right)
    sys.exit(failures > 0)


def error(check: Check, *inputs: Any) -> jax.Array:
    """The largest relative error of a row, [] f32."""
    return row_error(check.kernel(*inputs), check.reference(*inputs))


def run(check: Check) -> tuple[float, str]:
    """The error, or why there is none."""
    try:
        inputs = jax.jit(check.inputs)(jax.random.key(0))
        return float(jax.jit(lambda *inputs: error(check, *inputs))(*inputs)), ""
    except Exception as failure:  # the other checks say something all the same
        return float("nan"), f"{type(failure).__name__}: {failure}".splitlines()[0]


def report(check: Check, found: float, failure: str) -> bool:
    right = found <= check.tolerance
    verdict = "ok" if right else failure or "WRONG"
    print(f"{check.name:<72} error {found:.1e}, at most {check.tolerance:.0e}  {verdict}", flush=True)
    return right


if __name__ == "__main__":
    main()
