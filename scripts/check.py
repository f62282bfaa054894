"""A small case of a kernel and what it is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Check:
    """`kernel(*inputs(key))` is held to `reference(*inputs(key))`."""

    name: str
    """The op first."""
    inputs: Callable[[jax.Array], tuple[Any, ...]]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    """In float32."""
    tolerance: float
    """Largest relative error of a row."""
