"""Reading CUPTI's times, from a CUPTI that is not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from scripts import device_time


class Cupti:
    """Answers with the times given, and notes how many calls it has seen when it starts to count."""

    def __init__(self, times, calls):
        self.times, self.calls = times, calls
        self.before = None
        self.subscribed = False

    def _cupti_init(self):
        self.subscribed = True
        self.before = len(self.calls)

    def _cupti_get_timings(self, finalize):
        assert finalize
        self.subscribed = False
        return [("kernel", time) for time in self.times]


def measure(monkeypatch, times, repeats):
    """(kernel times, the arguments of the counted calls)."""
    calls = []

    def call(i):
        calls.append(i)
        return jnp.zeros(1)

    cupti = Cupti(times, calls)
    monkeypatch.setattr(device_time.mosaic_gpu, "_mosaic_gpu_ext", cupti)
    return device_time.kernel_times(call, repeats), calls[cupti.before :]


def test_the_median_of_each_kernel_in_microseconds(monkeypatch):
    times = [0.010, 0.002, 0.030, 0.001, 0.020, 0.009]  # milliseconds: three calls of two kernels
    assert measure(monkeypatch, times, 3) == (pytest.approx([20.0, 2.0]), [0, 1, 2])


def test_all_kernels_of_a_call_add_up(monkeypatch):
    monkeypatch.setattr(device_time, "kernel_times", lambda call, repeats: [20.0, 2.5])
    assert device_time.microseconds(lambda i: None) == 22.5


@pytest.mark.parametrize("times", [[], [0.01] * 5])
def test_kernels_that_come_and_go_are_an_error(monkeypatch, times):
    with pytest.raises(RuntimeError, match=f"{len(times)} kernels in 3 calls"):
        measure(monkeypatch, times, 3)


def test_outputs_may_be_donated_to_the_next_call(monkeypatch):
    monkeypatch.setattr(device_time.mosaic_gpu, "_mosaic_gpu_ext", Cupti([0.01] * 3, []))
    add = jax.jit(lambda pool: pool + 1.0, donate_argnums=0)
    pool = jnp.zeros(8)

    def call(i):
        nonlocal pool
        pool = add(pool)
        return pool

    assert device_time.kernel_times(call, 3) == [10.0]
    assert pool[0] == 2 + 3, "two calls to warm up"


def test_a_failure_releases_cupti(monkeypatch):
    cupti = Cupti([], [])
    monkeypatch.setattr(device_time.mosaic_gpu, "_mosaic_gpu_ext", cupti)
    turns = iter(range(3))
    with pytest.raises(StopIteration):
        device_time.kernel_times(lambda i: jnp.zeros(next(turns)), 8)
    assert cupti.before is not None, "it had started"
    assert not cupti.subscribed


def test_ceilings(monkeypatch):
    """Bytes read and operations done, over microseconds."""
    monkeypatch.setattr(device_time.jax.random, "normal", lambda key, shape, dtype: jnp.zeros((2, 8), dtype))
    monkeypatch.setattr(device_time, "microseconds", lambda call, repeats: (call(0), call(1), 4.0)[2])
    monkeypatch.setattr(device_time.jax, "jit", lambda fn: lambda *arrays: None)
    assert device_time.read_ceiling() == 32 / 4e-6
    assert device_time.matmul_ceiling() == 2 * 8192**3 / 4e-6
