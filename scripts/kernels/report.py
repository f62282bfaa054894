"""Results as lines of a table, as JSON, and as a roofline."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.kernels.measure import Ceilings, Result

HEADER = f"{'':<44} {'us':>9} {'GB/s':>6} {'share':>6} {'TFLOP/s':>8} {'error':>8}  target; rivals, in our time"


def line(result: Result, ceilings: Ceilings) -> str:
    """One row: our program, its targets, and how many times as long the others take."""
    ours, rivals = result.ours, list(result.timings)[1:]
    words = [f"{words}: {'met' if met else 'MISSED'}" for words, met in result.targets(ceilings)]
    words += [f"{rival} {result.timings[rival].us / ours.us:.2f}x" for rival in rivals if result.timings[rival].kernels]
    words += [f"{name} FAILED: {timing.failure}" for name, timing in result.timings.items() if timing.failure]
    return (
        f"{result.case.full_name:<44} {ours.us:9.1f} {result.bytes_per_second / 1e9:6.0f}"
        f" {result.bytes_per_second / ceilings.read:6.1%} {result.flops_per_second / 1e12:8.1f} {ours.error:8.1e}"
        f"  {'; '.join(words)}"
    )


def write_json(path: Path, about: dict[str, Any], results: Sequence[Result], ceilings: Ceilings) -> None:
    """`about`: what to say of the run. Numbers that are not there are null."""
    report = about | {
        "read_ceiling": ceilings.read,
        "matmul_ceiling": ceilings.matmul,
        "cases": [result.as_dict(ceilings) for result in results],
    }
    path.write_text(json.dumps(_finite(report), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(path: Path, results: Sequence[Result], ceilings: Ceilings, device: str) -> None:
    """A roofline: operations a second over operations a byte, below what the device reads and multiplies at most.

    Needs the `plot` extra. Cases that were not timed are left out.
    """
    from matplotlib.figure import Figure

    timed = [result for result in results if result.ours.kernels]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=f"Kernels on {device}"
    )
    for op in dict.fromkeys(result.case.op for result in timed):
        own = [result for result in timed if result.case.op == op]
        axes.scatter(
            [result.case.flops / result.case.bytes for result in own],
            [result.flops_per_second / 1e12 for result in own],
            label=op,
        )
    ridge = ceilings.matmul / ceilings.read
    intensities = [result.case.flops / result.case.bytes for result in timed]
    ends = [min([0.5 * ridge, *intensities]) / 2, ridge, max([2 * ridge, *intensities]) * 2]
    axes.plot(ends, [min(end * ceilings.read, ceilings.matmul) / 1e12 for end in ends], color="black", linewidth=1)
    axes.legend()
    figure.savefig(path, dpi=150)
