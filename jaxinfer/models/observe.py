"""A look at what the projections take, for whoever runs the modules: nothing else in them changes for it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import jax
from jax.experimental import io_callback

type Observer = Callable[[str, jax.Array], None]

_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Programs traced inside hand the inputs of every projection that they run to `observer`, on the host.

    observer: takes the projection's path within its layer, as `attention.qkv`, and [tokens, *inputs]. When a program
    has run, `jax.effects_barrier` waits until it was called.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observing() -> bool:
    return _observer.get() is not None


def observe(name: str, x: jax.Array) -> None:
    """x: what the projection called `name` is about to take. Traces to nothing where nobody looks."""
    observer = _observer.get()
    if observer is not None:
        io_callback(functools.partial(observer, name), None, x)
