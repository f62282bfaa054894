"""What programs are compiled for."""

from __future__ import annotations

import types

import jax
import pytest

from pallas_kernels.target import CPU, H200, Target


def gpu(capability: str, cores: int = 132) -> types.SimpleNamespace:
    return types.SimpleNamespace(platform="gpu", compute_capability=capability, core_count=cores)


def test_a_cpu():
    assert Target.of(jax.devices()[0]) == CPU


@pytest.mark.parametrize(
    ("device", "target"),
    [
        (gpu("9.0"), H200),
        (gpu("9.0", 114), Target("gpu", (9, 0), 114)),
        (gpu("8.0", 108), Target("gpu", (8, 0), 108)),
        (gpu("12.0", 170), Target("gpu", (12, 0), 170)),
        (gpu("gfx942", 304), Target("gpu", None, 304)),
    ],
)
def test_a_gpu(device, target):
    assert Target.of(device) == target


@pytest.mark.parametrize("target", [H200, Target("gpu", (9, 0), 114)])
def test_hopper(target):
    assert target.lacks_hopper() is None


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (CPU, "a CPU"),
        (Target("gpu", (8, 0), 108), "compute capability 8.0"),
        (Target("gpu", (10, 0), 148), "compute capability 10.0"),
        (Target("tpu"), "another TPU"),
        (Target("gpu", None, 304), "another GPU"),
    ],
)
def test_others_are_told_what_they_are(target, name):
    assert target.lacks_hopper() == f"it is written for Hopper GPUs (compute capability 9.0), and this is {name}"
