"""Which implementation of an operation runs, and the shape checks every operation shares."""

from __future__ import annotations

from typing import Literal

import jax

type Implementation = Literal["xla"] | None
"""By name, or None: the fastest that can run here."""


def resolve(op: str, implementation: Implementation) -> Literal["xla"]:
    """The implementation to run; ValueError for a name this operation does not have."""
    if implementation not in (None, "xla"):
        raise ValueError(f"{op} has no implementation {implementation!r}; it has: xla")
    return "xla"


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
