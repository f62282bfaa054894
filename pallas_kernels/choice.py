"""Which implementation of an operation runs, and the shape checks every operation shares."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax

log = logging.getLogger(__name__)

type Implementation = Literal["mosaic", "xla"] | None
"""By name, or None: the kernel (`mosaic`) where it can run and wins, else plain JAX (`xla`)."""


def resolve(op: str, implementation: Implementation, obstacle: str | None) -> Literal["mosaic", "xla"]:
    """The implementation to run. obstacle: why the kernel cannot run, or does not win, with these arguments here.

    Raises ValueError for a name this operation does not have, and for "mosaic" where there is an obstacle.
    """
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(f"{op} has no implementation {implementation!r}; it has: mosaic, xla")
    if implementation == "xla":
        return "xla"
    if obstacle is None:
        return "mosaic"
    if implementation == "mosaic":
        raise ValueError(f"the kernel of {op} cannot run: {obstacle}; use implementation='xla', or None to choose")
    _log_once(op, obstacle)
    return "xla"


@functools.cache
def _log_once(op: str, obstacle: str) -> None:
    log.info("%s runs on XLA: %s", op, obstacle)


def check_shape(name: str, array: jax.Array, shape: tuple[int | None, ...]) -> None:
    """ValueError unless `array` has this shape; None stands for any size."""
    fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {array.shape}; it must be [{wanted}]")


def check_window(window: int | None) -> None:
    """ValueError for a window that is not None and below 1."""
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 token, or None for all")
