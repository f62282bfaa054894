"""Meshes have four named axes, tensor innermost; too few devices is said with the numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from meshes import AXES, build_mesh


def test_axes_are_named_and_size_one_where_unused():
    mesh = build_mesh(tensor=4)
    assert mesh.axis_names == AXES == ("data", "pipe", "expert", "tensor")
    assert dict(mesh.shape) == {"data": 1, "pipe": 1, "expert": 1, "tensor": 4}
    assert mesh.axis_types == (AxisType.Auto,) * 4
    assert mesh.devices.flatten().tolist() == jax.devices()[:4]


def test_devices_of_one_tensor_group_are_neighbours():
    mesh = build_mesh(data=2, pipe=2, tensor=2)
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 1, 2))


def test_given_devices_are_taken_in_order():
    devices = jax.devices()[::-1]
    assert build_mesh(expert=2, devices=devices).devices.flatten().tolist() == devices[:2]


def test_too_few_devices():
    message = (
        r"a mesh of data=1, pipe=2, expert=1, tensor=8 needs 16 devices, and there are 8 \(cpu\); lower the parallel "
        r"sizes, or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=N"
    )
    with pytest.raises(ValueError, match=message):
        build_mesh(pipe=2, tensor=8)
    with pytest.raises(ValueError, match="needs 2 devices, and there are 1"):
        build_mesh(tensor=2, devices=jax.devices()[:1])
