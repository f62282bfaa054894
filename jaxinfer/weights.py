"""Weights on the mesh: their shapes and shardings, and random ones for measuring."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import (
    Parameter,
    Tree,
    abstract,
    declare,
    flatten,
    is_quantized,
    quantized,
    stored_axes,
    unflatten,
)
from meshes import partition_spec, sharding

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def resolve_dtype(dtype: str, platform: str) -> jnp.dtype:
    """`auto`: float32 on CPU, whose arithmetic it is, else bfloat16. Raises ValueError for a name not known."""
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[dtype])


def abstract_weights(
    config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, quantization: Quantization | None = None
) -> Tree:
    """Shape, dtype and sharding of every weight. config: as laid out for the mesh; quantization: resolved.

    Raises ValueError if int4 groups would be cut by the mesh.
    """
    tree = abstract(config, dtype, functools.partial(sharding, mesh), quantization)
    for path, leaf in flatten(tree):
        if is_quantized(leaf) and leaf.group_size:
            local = leaf.inputs * leaf.values.sharding.shard_shape(leaf.values.shape)[-1] // leaf.values.shape[-1]
            if local % leaf.group_size:
                raise ValueError(
                    f"int4 groups of {leaf.group_size} do not divide the {local} inputs of {path} on each device; "
                    "use a smaller tensor_parallel_size, int8, or python -m convert with a smaller --group-size"
                )
    return tree


def partition_specs(parameter: Parameter, weight: Any) -> Any:
    """The PartitionSpec of a weight, an array or a QuantizedArray of them, for jax.shard_map."""
    if not is_quantized(weight):
        return partition_spec(parameter.axes)
    axes = stored_axes(parameter, weight)
    return dataclasses.replace(weight, **{name: partition_spec(part) for name, part in axes.items()})


def random_weights(
    config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, seed: int = 0, quantization: Quantization | None = None
) -> Tree:
    """Weights as declared, made on their devices, one at a time; the whole of a quantized one only while it is made."""
    key, leaves = jax.random.key(seed), {}
    shapes = dict(flatten(abstract_weights(config, dtype, mesh, quantization)))
    for number, (path, parameter) in enumerate(flatten(declare(config))):
        make = _initialiser(parameter, dtype, shapes[path], quantization)
        leaves[path] = make(jax.random.fold_in(key, number))
        if is_quantized(shapes[path]):
            jax.block_until_ready(leaves[path])
    return unflatten(leaves)


@functools.cache
def _initialiser(
    parameter: Parameter, dtype: jnp.dtype, leaf: Any, quantization: Quantization | None
) -> jax.stages.Wrapped:
    def make(key: jax.Array) -> Any:
        if parameter.initialiser == "normal":
            deviation = jnp.asarray(parameter.fan_in**-0.5, dtype)
            weight = jax.random.normal(key, parameter.shape, dtype) * deviation
        else:
            weight = jnp.full(parameter.shape, parameter.initialiser == "ones", dtype)
        return quantized(weight, parameter, quantization) if is_quantized(leaf) else weight

    return jax.jit(make, out_shardings=jax.tree.map(lambda part: part.sharding, leaf))


def size_in_bytes(weights: Tree) -> int:
    """Bytes of all weights, counted once whatever the mesh; of arrays or ShapeDtypeStructs."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
