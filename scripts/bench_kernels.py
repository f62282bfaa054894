"""Kernels against the ceilings of a GPU: first each is checked, then timed beside XLA, cuDNN and JAX's examples.

    python scripts/bench_kernels.py [--only PATTERN] [--json FILE] [--plot FILE.png]

A program that is wrong is not timed. Exit status 1 if one was wrong or failed; a missed target is only told. Times are
those of the GPU itself (CUPTI, without launch gaps), shares are of the read ceiling measured in the same run. GPU time
is dear: compile what can be on any machine (the `aot` extra, JAX_PLATFORMS=cpu), then carry the folder to the GPU.

    python scripts/bench_kernels.py --compile-only --executables FOLDER [--gpu h100]
    python scripts/bench_kernels.py --executables FOLDER --json results.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import aot, device_time, kernels
from scripts.kernels import report
from scripts.kernels.common import Case
from scripts.kernels.measure import Ceilings, Result, Timer, measure
from scripts.kernels.stages import compile_ahead, compile_here


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="cases whose name holds this regular expression")
    parser.add_argument("--no-rivals", action="store_true", help="only our programs, and what a target compares with")
    parser.add_argument("--list", action="store_true", help="print the cases' names and stop")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results, again after each case")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw a roofline (the `plot` extra)")
    parser.add_argument("--executables", metavar="FOLDER", type=Path, help="where compiled programs are, or go")
    parser.add_argument("--compile-only", action="store_true", help="compile for --gpu into --executables and stop")
    parser.add_argument("--gpu", choices=aot.GPUS, default="h200", help="which GPU (default h200)")
    args = parser.parse_args(arguments)
    cases = [case for case in all_cases() if re.search(args.only, case.full_name)]
    if args.no_rivals:
        cases = [without_rivals(case) for case in cases]
    if not cases:
        parser.error(f"no case has a name like {args.only!r}; --list shows them")
    if args.compile_only and args.executables is None:
        parser.error("--compile-only needs --executables, the folder to write")
    if args.list:
        print("\n".join(case.full_name for case in cases))
    elif args.compile_only:
        compile_ahead(cases, args.executables, args.gpu)
    else:
        results, ceilings = run(
            cases, args.executables, args.gpu, device_time.kernel_times, measured_ceilings, args.json
        )
        if args.plot is not None:
            report.plot(args.plot, results, ceilings, jax.devices()[0].device_kind)
        sys.exit(not all(result.right for result in results))


def all_cases() -> list[Case]:
    """Those of every module of `scripts.kernels` that has any."""
    modules = [importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    cases = [case for module in modules if hasattr(module, "cases") for case in module.cases()]
    names = [case.full_name for case in cases]
    if len(set(names)) < len(names):
        raise ValueError(f"cases share a name: {sorted(name for name in set(names) if names.count(name) > 1)}")
    return cases


def without_rivals(case: Case) -> Case:
    ours = next(iter(case.programs))
    kept = {ours} if case.max_ratio is None else {ours, case.max_ratio[0]}
    return dataclasses.replace(case, programs={name: p for name, p in case.programs.items() if name in kept})


def measured_ceilings() -> Ceilings:
    return Ceilings(device_time.read_ceiling(), device_time.matmul_ceiling())


def run(
    cases: Sequence[Case],
    executables: Path | None,
    gpu: str,
    timer: Timer,
    ceilings_of: Callable[[], Ceilings],
    json_file: Path | None,
) -> tuple[list[Result], Ceilings]:
    """Compile everything, then measure the ceilings and case after case; each case is printed when it is done."""
    start = time.perf_counter()
    compiled = compile_here(cases, executables, gpu)
    print(f"{len(compiled)} programs are ready after {time.perf_counter() - start:.0f} s", flush=True)
    ceilings = ceilings_of()
    print(f"ceilings: {ceilings.read / 1e9:.0f} GB/s read, {ceilings.matmul / 1e12:.0f} TFLOP/s bf16\n{report.HEADER}")
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "gpu": gpu}
    results: list[Result] = []
    for case in cases:
        results.append(measure(case, compiled, timer))
        print(report.line(results[-1], ceilings), flush=True)
        if json_file is not None:
            report.write_json(json_file, about, results, ceilings)
    print(f"done after {time.perf_counter() - start:.0f} s", flush=True)
    return results, ceilings


if __name__ == "__main__":
    main()
