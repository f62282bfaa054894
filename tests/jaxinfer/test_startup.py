"""How memory is planned, and how a start-up ends early."""

import functools
import gc
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxinfer import compilation, memory
from jaxinfer.config import EngineConfig
from jaxinfer.engine.batch import BatchBuilder
from jaxinfer.startup import largest_shapes
from meshes import build_mesh


def test_the_programs_that_need_the_most_memory_are_measured():
    engine = EngineConfig(max_model_len=4096, max_num_seqs=64)
    shapes = BatchBuilder(engine, groups=1, data_dependent=False).shapes()
    largest = {(shape.decode, shape.scored): shape for shape in largest_shapes(shapes)}
    assert len(largest) == 3
    decode, ragged, scored = largest[True, False], largest[False, False], largest[False, True]
    assert (decode.sequences, decode.width, decode.sampling) == (64, 64, "full")
    assert (ragged.tokens, ragged.sampling) == (2048, "full")
    assert scored.tokens == 256


@pytest.mark.parametrize("name", memory.FRACTION_VARIABLES)
def test_a_users_memory_fraction_wins(monkeypatch, name):
    for other in memory.FRACTION_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "0.5")
    memory.reserve(0.9)
    assert [memory.os.environ.get(other) for other in memory.FRACTION_VARIABLES].count(None) == 1
    monkeypatch.delenv(name)
    memory.reserve(0.9)
    assert memory.os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")


def test_a_gpu_has_what_its_fullest_device_leaves():
    """The share asked for is the backend's limit already; weights, temporaries and holes come off it."""
    gpus = np.empty(2, object)
    for i, used in enumerate((300, 500)):
        stats = {"bytes_limit": 1000 + 2 * memory.HOLES * memory.HOLE_BYTES, "bytes_in_use": used}
        gpus[i] = SimpleNamespace(platform="gpu", memory_stats=lambda stats=stats: stats)
    assert memory.free_bytes(SimpleNamespace(devices=gpus, local_devices=list(gpus)), temporaries=120) == 380


def test_holes_lie_between_small_arrays(monkeypatch):
    """The holes were arrays, which are gone; on CPU there is no CUDA graph to keep."""
    assert memory.keep_temporaries_in_place(build_mesh()) == []
    gpus = np.asarray([SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(memory, "sharding", lambda mesh: jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def as_large_as_a_hole():
        gc.collect()
        return sum(array.nbytes == memory.HOLE_BYTES for array in jax.live_arrays())

    before = as_large_as_a_hole()
    kept = memory.keep_temporaries_in_place(SimpleNamespace(devices=gpus))
    assert [array.nbytes for array in kept] == [1] * memory.HOLES
    assert as_large_as_a_hole() == before


class Slow:
    """A program whose compilation takes a while, or fails."""

    def __init__(self, started: list, fails: bool):
        self._started, self._fails = started, fails

    def compile(self):
        self._started.append(threading.get_ident())
        if self._fails:
            raise RuntimeError("no such instruction")
        time.sleep(0.2)


def test_a_failed_compilation_does_not_wait_for_those_queued():
    started: list[int] = []
    jobs = [functools.partial(Slow, started, number == 0) for number in range(100)]
    with pytest.raises(RuntimeError, match="no such instruction"):
        compilation.compile_all(jobs, progress=False)
    time.sleep(0.5)
    assert len(started) < 50
