"""Logical axes go to mesh axes through one table; unknown ones and collisions are refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshes import AXES, RULES, build_mesh, partition_spec, sharding


def test_rules_name_axes_that_meshes_have():
    assert {axis for axis in RULES.values() if axis is not None} <= set(AXES)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ((), PartitionSpec()),
        (("embed",), PartitionSpec(None)),
        (("vocab", "embed"), PartitionSpec("tensor", None)),
        (("embed", "kv_heads", None, "head_dim"), PartitionSpec(None, "tensor", None, None)),
        (("embed", None, "mlp"), PartitionSpec(None, None, "tensor")),
        (("pages", "kv_heads", "page", "head_dim"), PartitionSpec(None, "tensor", None, None)),
    ],
)
def test_partition_spec(axes, spec):
    assert partition_spec(axes) == spec


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match=r"unknown logical axes \['depth', 'width'\]; known: vocab, kv_heads, heads"):
        partition_spec(("embed", "depth", None, "width"))


def test_two_dimensions_on_one_mesh_axis_are_refused():
    message = (
        r"logical axes \('vocab', 'embed', 'mlp'\) put two dimensions on one mesh axis: \('tensor', None, 'tensor'\)"
    )
    with pytest.raises(ValueError, match=message):
        partition_spec(("vocab", "embed", "mlp"))


def test_arrays_are_sliced_along_the_mesh_axis():
    mesh = build_mesh(tensor=4)
    rows = np.arange(24).reshape(8, 3)
    placed = jax.device_put(rows, sharding(mesh, ("vocab", "embed")))
    for number, shard in enumerate(placed.addressable_shards):
        np.testing.assert_array_equal(shard.data, rows[2 * number : 2 * number + 2])
    copies = jax.device_put(rows, sharding(mesh))
    assert [shard.data.shape for shard in copies.addressable_shards] == [(8, 3)] * 4
