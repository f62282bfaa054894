"""Weights on the mesh: their shapes and shardings, and random ones for measuring."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Parameter, Tree, declare, flatten, unflatten
from meshes import sharding

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def resolve_dtype(dtype: str, platform: str) -> jnp.dtype:
    """`auto`: float32 on CPU, whose arithmetic it is, else bfloat16. Raises ValueError for a name not known."""
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[dtype])


def abstract_weights(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> Tree:
    """Shape, dtype and sharding of every weight. config: as laid out for the mesh."""
    return unflatten(
        {
            path: jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=sharding(mesh, parameter.axes))
            for path, parameter in flatten(declare(config))
        }
    )


def random_weights(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, seed: int = 0) -> Tree:
    """Weights as declared, made on their devices, one at a time."""
    key, leaves = jax.random.key(seed), {}
    for number, (path, parameter) in enumerate(flatten(declare(config))):
        where = sharding(mesh, parameter.axes)
        leaves[path] = _initialise(jax.random.fold_in(key, number), parameter, dtype, where)
    return unflatten(leaves)


def _initialise(key: jax.Array, parameter: Parameter, dtype: jnp.dtype, where: NamedSharding) -> jax.Array:
    return _initialiser(parameter, dtype, where)(key)


@functools.cache
def _initialiser(parameter: Parameter, dtype: jnp.dtype, where: NamedSharding) -> jax.stages.Wrapped:
    def make(key: jax.Array) -> jax.Array:
        if parameter.initialiser == "normal":
            deviation = jnp.asarray(parameter.fan_in**-0.5, dtype)
            return jax.random.normal(key, parameter.shape, dtype) * deviation
        return jnp.full(parameter.shape, parameter.initialiser == "ones", dtype)

    return jax.jit(make, out_shardings=where)


def size_in_bytes(weights: Tree) -> int:
    """Bytes of all weights, counted once whatever the mesh; of arrays or ShapeDtypeStructs."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
