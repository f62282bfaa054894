"""Checks a case's programs against the reference, then times the right ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.kernels.common import Case, Program
from scripts.kernels.stages import Compiled

L2_BYTES = 64 << 20
"""At least what a GPU's L2 cache holds; 50 MB on H100 and H200."""
MOST_TURNS = 8
REPEATS = 16

type Timer = Callable[[Callable[[int], Any], int], list[float]]
"""Microseconds of each kernel that one call launches, from `call` and a number of repeats."""


@dataclass(frozen=True)
class Ceilings:
    """What the device does at most, measured in the same run."""

    read: float
    """Bytes a second."""
    matmul: float
    """bfloat16 operations a second."""


@dataclass(frozen=True)
class Timing:
    """What became of one program."""

    error: float
    """As `Case.tolerance` has it; NaN if it gave NaN, or failed."""
    kernels: tuple[float, ...] = ()
    """Microseconds of each kernel; empty if it was wrong or failed."""
    failure: str | None = None

    @property
    def us(self) -> float:
        """Microseconds on the device; NaN if not timed."""
        return sum(self.kernels) if self.kernels else math.nan


@dataclass(frozen=True)
class Result:
    """A case and its timings by program, ours first."""

    case: Case
    timings: Mapping[str, Timing]

    @property
    def ours(self) -> Timing:
        return next(iter(self.timings.values()))

    @property
    def bytes_per_second(self) -> float:
        return self.case.bytes / self.ours.us * 1e6

    @property
    def flops_per_second(self) -> float:
        return self.case.flops / self.ours.us * 1e6

    @property
    def right(self) -> bool:
        """Whether every program ran and was within the tolerance."""
        return all(timing.error <= self.case.tolerance for timing in self.timings.values())

    def targets(self, ceilings: Ceilings) -> list[tuple[str, bool]]:
        """Each target of the case in words, and whether it is met. What was not timed meets none."""
        case, found = self.case, []
        if case.min_share is not None:
            found.append((f"share ≥ {case.min_share:.0%}", self.bytes_per_second / ceilings.read >= case.min_share))
        if case.min_tflops is not None:
            found.append((f"≥ {case.min_tflops:g} TFLOP/s", self.flops_per_second >= case.min_tflops * 1e12))
        if case.max_ratio is not None:
            rival, most = case.max_ratio
            found.append((f"time ≤ {most:g} of {rival}", self.ours.us <= most * self.timings[rival].us))
        return found

    def as_dict(self, ceilings: Ceilings) -> dict[str, Any]:
        return {
            "name": self.case.full_name,
            "bytes": self.case.bytes,
            "flops": self.case.flops,
            "tolerance": self.case.tolerance,
            "programs": {
                name: {"error": t.error, "us": t.us, "kernels_us": t.kernels, "failure": t.failure}
                for name, t in self.timings.items()
            },
            "share": self.bytes_per_second / ceilings.read,
            "tflops": self.flops_per_second / 1e12,
            "targets": [{"target": words, "met": met} for words, met in self.targets(ceilings)],
        }


def turns(case: Case) -> int:
    """How many sets of inputs it takes that each is out of the L2 cache when its turn comes again."""
    return min(MOST_TURNS, 1 + math.ceil(2 * L2_BYTES / case.bytes))


def measure(case: Case, compiled: Mapping[tuple[str, str], Compiled], timer: Timer) -> Result:
    """Check and time every program of the case; what fails is told in its Timing, and the others go on."""

    def stage(name: str) -> Compiled:
        return compiled[case.full_name, name]

    def inputs(turn: int) -> tuple[Any, ...]:
        return stage("inputs")(np.array([0, turn], np.uint32))

    def time_program(name: str, expected: Any) -> Timing:
        program, error = case.programs[name], math.nan

        def arguments(turn: int) -> list[Any]:
            return list(inputs(turn) if program.prepare is None else stage(f"prepare {name}")(*inputs(turn)))

        try:
            error = float(stage(f"check {name}")(stage(name)(*arguments(0)), expected))
            if not error <= case.tolerance:
                return Timing(error, failure=f"wrong: its error is {error:.1e}, the tolerance {case.tolerance:.1e}")
            call = rotating(stage(name), [arguments(turn) for turn in range(turns(case))], program)
            return Timing(error, tuple(timer(call, REPEATS)))
        except Exception as failure:  # a rival out of memory must not cost the other cases their time on the device
            return Timing(error, failure=_in_a_line(failure))

    try:
        expected = stage("reference")(*inputs(0))
    except Exception as failure:
        return Result(case, {name: Timing(math.nan, failure=_in_a_line(failure)) for name in case.programs})
    return Result(case, {name: time_program(name, expected) for name in case.programs})


def rotating(compiled: Compiled, sets: list[list[Any]], program: Program) -> Callable[[int], Any]:
    """call(i) on each set of arguments in turn; what is updated in place takes the place of the argument."""

    def call(i: int) -> Any:
        args = sets[i % len(sets)]
        outputs = compiled(*args)
        for argument, output in program.in_place.items():
            args[argument] = outputs[output]
        return outputs

    return call


def _in_a_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]
