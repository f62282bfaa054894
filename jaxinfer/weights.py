"""Weights on the mesh: their shapes and shardings, and random ones for measuring."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.config import ModelConfig, ParallelConfig, Quantization
from jaxinfer.parameters import (
    Parameter,
    Tree,
    abstract,
    declare,
    flatten,
    for_tensor_parallel,
    is_quantized,
    quantized,
    resolve,
    stored_axes,
    unflatten,
)
from meshes import AXES, partition_spec, sharding
from pallas_kernels.formats import dequantize

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def resolve_dtype(dtype: str, platform: str) -> jnp.dtype:
    """`auto`: float32 on CPU, whose arithmetic it is, else bfloat16. Raises ValueError for a name not known."""
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[dtype])


def abstract_weights(
    config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | AbstractMesh, quantization: Quantization | None = None
) -> Tree:
    """Shape, dtype and sharding of every weight. config: as laid out for the mesh; quantization: resolved.

    Raises ValueError if groups of inputs that share a scale would be cut by the mesh.
    """
    tree = abstract(config, dtype, functools.partial(sharding, mesh), quantization)
    if (cut := cut_groups(tree)) is not None:
        raise ValueError(
            f"{cut}; use a smaller tensor_parallel_size, int8, or python -m convert with a smaller --group-size"
        )
    return tree


def check_fits(config: ModelConfig, parallel: ParallelConfig, quantization: Quantization | None) -> None:
    """ValueError if a mesh of these sizes could not hold the model, stored so; needs no devices."""
    mesh = AbstractMesh(tuple(getattr(parallel, axis) for axis in AXES), AXES)
    physical = for_tensor_parallel(config, parallel.tensor)
    abstract_weights(physical, jnp.dtype(jnp.bfloat16), mesh, resolve(config, quantization))


def cut_groups(tree: Tree) -> str | None:
    """What is wrong with abstract weights on a mesh that cuts a group; None if it cuts none."""
    for path, leaf in flatten(tree):
        if is_quantized(leaf) and leaf.group_size:
            local = leaf.inputs * leaf.values.sharding.shard_shape(leaf.values.shape)[-1] // leaf.values.shape[-1]
            if local % leaf.group_size:
                groups = f"{leaf.format} groups of {leaf.group_size}"
                return f"{groups} do not divide the {local} inputs of {path} on each device"
    return None


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


def rounding_activations(weights: Tree, config: ModelConfig) -> Tree:
    """The same weights, where those of layers in 8 bits say that what they multiply is rounded, too; experts are left.

    The head is left as well: its products are the logits. config: as laid out for the mesh.
    """
    leaves = dict(flatten(weights))
    for path, parameter in flatten(declare(config)):
        if is_quantized(leaves[path]) and not parameter.batch and "vocab" not in parameter.axes:
            leaves[path] = dataclasses.replace(leaves[path], round_activations=True)
    return unflatten(leaves)


def row_lengths(head: Any) -> jax.Array:
    """[vocab] f32: of the head's rows; one for a row of zeros. head: [embed, vocab], or quantized."""
    wide = dequantize(head, jnp.float32).T if is_quantized(head) else head.astype(jnp.float32)
    lengths = jnp.linalg.norm(wide, axis=0)
    return jnp.where(lengths > 0, lengths, 1.0)


def fold_head_norm(weights: Tree, config: ModelConfig) -> tuple[Tree, ModelConfig]:
    """The same model with rows of the head that are of length one already, so that no step has to divide by theirs.

    The head that is passed in is used up.
    """
    if not config.head_norm:
        return weights, config
    head = weights["head"]["weight"]
    change = jax.jit(_unit_rows, donate_argnums=0, out_shardings=jax.tree.map(lambda part: part.sharding, head))
    folded = {**weights, "head": {**weights["head"], "weight": change(head)}}
    return folded, dataclasses.replace(config, head_norm=False)


def _unit_rows(head: Any) -> Any:
    if is_quantized(head):
        return dataclasses.replace(head, scales=head.scales / row_lengths(head).reshape(head.scales.shape))
    return (head.astype(jnp.float32) / row_lengths(head)).astype(head.dtype)


def size_in_bytes(weights: Tree) -> int:
    """Bytes of all weights, counted once whatever the mesh; of arrays or ShapeDtypeStructs."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
