"""Which implementation of an operation runs, and the shape checks every operation shares."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax

from pallas_kernels.formats import QuantizedRows

log = logging.getLogger(__name__)

type Implementation = Literal["mosaic", "xla"] | None
"""By name, or None: the kernel (`mosaic`) where it can run and wins, else plain JAX (`xla`)."""


@dataclass(frozen=True)
class Decision:
    """What runs, and why not the kernel."""

    op: str
    implementation: Literal["mosaic", "xla"]
    obstacle: str | None


_recorder: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar("recorder", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Decision]]:
    """The decisions made inside, in order. They are made while a program is traced, so a traced one makes none."""
    decisions: list[Decision] = []
    token = _recorder.set(decisions)
    try:
        yield decisions
    finally:
        _recorder.reset(token)


def resolve(
    op: str, implementation: Implementation, obstacle: str | None, loses: str | None = None
) -> Literal["mosaic", "xla"]:
    """The implementation to run. obstacle: why the kernel cannot run with these arguments here; loses: why it would be
    slower than XLA, which counts only if neither is asked for by name.

    Raises ValueError for a name this operation does not have, and for "mosaic" where there is an obstacle.
    """
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(f"{op} has no implementation {implementation!r}; it has: mosaic, xla")
    if implementation == "mosaic" and obstacle is not None:
        raise ValueError(f"the kernel of {op} cannot run: {obstacle}; use implementation='xla', or None to choose")
    reason = obstacle or (loses if implementation is None else None)
    chosen: Literal["mosaic", "xla"] = "xla" if implementation == "xla" or reason is not None else "mosaic"
    decisions = _recorder.get()
    if decisions is not None:
        decisions.append(Decision(op, chosen, reason))
    elif implementation is None and reason is not None:
        _log_once(op, reason)
    return chosen


@functools.cache
def _log_once(op: str, obstacle: str) -> None:
    log.info("%s runs on XLA: %s", op, obstacle)


def check_shape(name: str, array: jax.Array | QuantizedRows, shape: tuple[int | None, ...]) -> None:
    """ValueError unless `array` has this shape; None stands for any size."""
    fits = len(array.shape) == len(shape) and all(
        want in (None, got) for got, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {array.shape}; it must be [{wanted}]")


def check_window(window: int | None, name: str = "window") -> None:
    """ValueError for a window, or what `name` says, that is not None and below 1."""
    if window is not None and window < 1:
        raise ValueError(f"{name} is {window}; it must be at least 1 token, or None for all")
