"""Abstract trees and loaded weights on a mesh, for the tests of loading."""

import functools

import jax
import numpy as np

import convert
from jaxinfer.parameters import abstract, flatten, for_tensor_parallel, stored_parts
from meshes import build_mesh, sharding


def abstract_tree(config, tensor=1, dtype=np.float32, quantization=None, physical=None):
    """(abstract, physical) for a mesh of `tensor` devices; physical: as it fits that mesh, unless given."""
    place, physical = (
        functools.partial(sharding, build_mesh(tensor=tensor)),
        physical or for_tensor_parallel(config, tensor),
    )
    return abstract(physical, np.dtype(dtype), place, quantization), physical


def load_flat(checkpoint, tensor=1, dtype=np.float32, quantization=None):
    """Path → weight."""
    abstract, physical = abstract_tree(checkpoint.config, tensor, dtype, quantization)
    return dict(flatten(convert.load(checkpoint, abstract, physical, progress=False)))


def assert_same(first, second):
    """Same paths, formats, dtypes, shardings and bits."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for path in first:
        others = stored_parts(path, second[path])
        for name, part in stored_parts(path, first[path]).items():
            assert part.dtype == others[name].dtype, name
            assert part.sharding == others[name].sharding, name
            np.testing.assert_array_equal(np.asarray(part), np.asarray(others[name]), err_msg=name)
