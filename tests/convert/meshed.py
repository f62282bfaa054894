"""Abstract trees and loaded weights on a mesh, for the tests of loading."""

import jax
import numpy as np

import convert
from jaxinfer.parameters import declare, flatten, for_tensor_parallel, unflatten
from meshes import build_mesh, sharding


def abstract_tree(config, tensor=1, dtype=np.float32):
    """(abstract, physical) for a mesh of `tensor` devices."""
    mesh, physical = build_mesh(tensor=tensor), for_tensor_parallel(config, tensor)
    leaves = {
        path: jax.ShapeDtypeStruct(p.shape, np.dtype(dtype), sharding=sharding(mesh, p.axes))
        for path, p in flatten(declare(physical))
    }
    return unflatten(leaves), physical


def load_flat(checkpoint, tensor=1, dtype=np.float32):
    """Path → array."""
    abstract, physical = abstract_tree(checkpoint.config, tensor, dtype)
    return dict(flatten(convert.load(checkpoint, abstract, physical, progress=False)))


def assert_same(first, second):
    """Same paths, dtypes, shardings and bits."""
    assert first.keys() == second.keys()
    for path in first:
        assert first[path].dtype == second[path].dtype, path
        assert first[path].sharding == second[path].sharding, path
        np.testing.assert_array_equal(np.asarray(first[path]), np.asarray(second[path]), err_msg=path)
