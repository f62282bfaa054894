"""Which implementation runs, and what is told about it."""

from __future__ import annotations

import logging

import jax.numpy as jnp
import pytest

from pallas_kernels import choice


@pytest.fixture(autouse=True)
def nothing_logged_yet():
    choice._log_once.cache_clear()
    yield
    choice._log_once.cache_clear()


@pytest.mark.parametrize(
    ("implementation", "obstacle", "chosen"),
    [(None, None, "mosaic"), (None, "too small", "xla"), ("mosaic", None, "mosaic"), ("xla", None, "xla"),
     ("xla", "too small", "xla")],
)  # fmt: skip
def test_the_kernel_runs_where_it_can(implementation, obstacle, chosen):
    assert choice.resolve("op", implementation, obstacle) == chosen


@pytest.mark.parametrize(
    ("implementation", "obstacle", "chosen"),
    [(None, None, "xla"), ("mosaic", None, "mosaic"), ("xla", None, "xla"), (None, "too small", "xla")],
)
def test_a_kernel_that_loses_runs_only_when_asked_for(implementation, obstacle, chosen):
    with choice.recorded() as made:
        assert choice.resolve("op", implementation, obstacle, loses="slower") == chosen
    assert made[0].obstacle == (obstacle or (None if implementation else "slower"))
    with pytest.raises(ValueError, match="cannot run: too small"):
        choice.resolve("op", "mosaic", "too small", loses="slower")


def test_a_kernel_asked_for_by_name_does_not_fall_back():
    message = "the kernel of op cannot run: too small; use implementation='xla', or None to choose"
    with pytest.raises(ValueError, match=message):
        choice.resolve("op", "mosaic", "too small")


@pytest.mark.parametrize("obstacle", [None, "too small"])
def test_an_unknown_name(obstacle):
    with pytest.raises(ValueError, match="op has no implementation 'triton'; it has: mosaic, xla"):
        choice.resolve("op", "triton", obstacle)


def test_a_reason_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "pallas_kernels")
    for _ in range(3):
        choice.resolve("op", None, "too small")
        choice.resolve("other", None, "too small")
        choice.resolve("op", None, "too large")
    assert caplog.messages == [
        "op runs on XLA: too small",
        "other runs on XLA: too small",
        "op runs on XLA: too large",
    ]


@pytest.mark.parametrize(("implementation", "obstacle"), [("xla", "too small"), (None, None), ("mosaic", None)])
def test_what_was_wanted_is_not_logged(caplog, implementation, obstacle):
    caplog.set_level(logging.DEBUG, "pallas_kernels")
    choice.resolve("op", implementation, obstacle)
    assert caplog.messages == []


def test_decisions_are_recorded(caplog):
    caplog.set_level(logging.INFO, "pallas_kernels")
    with choice.recorded() as made:
        choice.resolve("op", None, "too small")
        choice.resolve("other", None, None)
        choice.resolve("op", "xla", None)
    choice.resolve("later", None, None)
    assert made == [
        choice.Decision("op", "xla", "too small"),
        choice.Decision("other", "mosaic", None),
        choice.Decision("op", "xla", None),
    ]
    assert caplog.messages == [], "recording is asking, not running"


@pytest.mark.parametrize("shape", [(2, 3), (None, 3), (None, None)])
def test_a_shape_that_fits(shape):
    choice.check_shape("x", jnp.zeros((2, 3)), shape)


@pytest.mark.parametrize("shape", [(2, 4), (None, 4), (2,), (2, 3, 1), ()])
def test_a_shape_that_does_not_fit(shape):
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    with pytest.raises(ValueError, match=rf"x has shape \(2, 3\); it must be \[{wanted}\]"):
        choice.check_shape("x", jnp.zeros((2, 3)), shape)


def test_windows():
    choice.check_window(None)
    choice.check_window(1)
    for window in (0, -4):
        with pytest.raises(ValueError, match=f"window is {window}; it must be at least 1 token, or None for all"):
            choice.check_window(window)
