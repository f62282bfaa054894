"""One canonical weight to its place on a mesh: quantized if asked for, and in the shape that the mesh runs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import Parameter, declare, flatten, is_quantized, quantized, to_physical

_REST = "tensor_rest"
"""A mesh axis: of the devices that share a piece of one dimension, those that have different pieces of another."""

type Leaf = Any
"""A jax.ShapeDtypeStruct with a sharding, or a QuantizedArray of them."""
type Weight = Any
"""A jax.Array, or a QuantizedArray of them."""


def put(array: np.ndarray, where: Any) -> jax.Array:
    """The array on the devices of a sharding; waits, so that the host copy can go before the next is made."""
    if len(where.device_set) == 1:
        placed = jax.device_put(array, where, may_alias=True)
    else:
        placed = jax.make_array_from_callback(array.shape, where, lambda index: array[index])
    return placed.block_until_ready()


def lay_out(path: str, weight: Weight, config: ModelConfig, physical: ModelConfig, leaf: Leaf) -> Weight:
    """A canonical weight, which lies on the mesh as `fitted` says, as `leaf` describes it.

    Waits, so that the caller may drop the canonical one before the next comes.
    """
    if is_quantized(weight) == is_quantized(leaf) and _shapes(weight) == _shapes(leaf):
        return weight
    parameter = dict(flatten(declare(config)))[path]
    if parameter.batch:  # whose shape is the same on every mesh
        return jax.block_until_ready(_quantize_experts(weight, parameter, leaf))
    # The same for every layer, so that one program serves them all.
    change = _changer(re.sub(r"\d+", "0", path), parameter, config, physical, leaf, is_quantized(weight))
    return jax.block_until_ready(change(weight))


def fitted(leaf: Leaf) -> Leaf:
    """The leaf in shards of its canonical shape, of which each device has as small a share as divides it."""
    return jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=_fitting(part.sharding, part.shape)), leaf
    )


def _fitting(where: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Where the mesh has more devices than divide the dimension that it shards, another one is sharded by the rest."""
    mesh = where.mesh
    axis = sharded_axis(where.spec)
    count = 1 if axis is None else mesh.shape[where.spec[axis]]
    if axis is None or shape[axis] % count == 0:
        return where
    own, other = shares(shape, axis, count)
    spec = [name if position == axis and own > 1 else None for position, name in enumerate(where.spec)]
    spec += [None] * (len(shape) - len(spec))
    if other is not None and shape[other] % (count // own) == 0:
        spec[other] = _REST
    place = mesh.axis_names.index(where.spec[axis])
    sizes = list(mesh.devices.shape)
    sizes[place : place + 1] = [own, count // own]
    names = (*mesh.axis_names[: place + 1], _REST, *mesh.axis_names[place + 1 :])
    split = Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(split, PartitionSpec(*spec))


def is_split(where: NamedSharding) -> bool:
    """Whether `fitted` had to share another dimension."""
    return _REST in where.mesh.axis_names


def sharded_axis(spec: PartitionSpec) -> int | None:
    """The dimension that tensor parallelism shards, if there is one."""
    return next((axis for axis, name in enumerate(spec) if name == "tensor"), None)


def shares(shape: tuple[int, ...], axis: int, count: int) -> tuple[int, int | None]:
    """How many of `count` pieces the dimension `axis` is cut into, and which dimension is cut into the others."""
    others = [other for other in range(len(shape)) if other != axis]
    return math.gcd(shape[axis], count), max(others, key=lambda other: shape[other], default=None)


def quantization_of(leaf: Leaf) -> Quantization:
    """What made, or is to make, a quantized leaf."""
    if leaf.format == "mxfp4":
        return Quantization("mxfp4", layers=False)
    return Quantization(leaf.format, leaf.group_size, leaf.format != "int4" or leaf.zeros is None)


@functools.cache
def _changer(
    path: str, parameter: Parameter, config: ModelConfig, physical: ModelConfig, leaf: Leaf, stored: bool
) -> Callable[[Weight], Weight]:
    def change(weight: Weight) -> Weight:
        if is_quantized(leaf) and not stored:
            weight = quantized(weight, parameter, quantization_of(leaf))
        return to_physical(path, weight, config, physical)

    return jax.jit(change, out_shardings=jax.tree.map(lambda part: part.sharding, leaf))


def _quantize_experts(weight: jax.Array, parameter: Parameter, leaf: Leaf) -> Weight:
    """Of the experts one after the other, so that only one is held a second time while it is rounded."""
    empty, put_one = _filling(parameter, leaf)
    out = empty()
    for number in range(parameter.shape[0]):
        out = put_one(out, weight, number)
    return out


@functools.cache
def _filling(parameter: Parameter, leaf: Leaf) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """A weight for all experts, and one that puts an expert, rounded, into its place there."""

    def empty() -> Weight:
        return jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), leaf)

    def put_one(out: Weight, weight: jax.Array, number: jax.Array) -> Weight:
        one = jax.lax.dynamic_index_in_dim(weight, number, keepdims=False)
        # Without the barrier XLA's CPU code makes each fp8 scale anew for every element.
        made = jax.lax.optimization_barrier(quantized(one, parameter.one, quantization_of(leaf)))
        return jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, number, 0), out, made)

    where = jax.tree.map(lambda part: part.sharding, leaf)
    return jax.jit(empty, out_shardings=where), jax.jit(put_one, donate_argnums=0, out_shardings=where)


def _shapes(weight: Weight | Leaf) -> list[tuple[int, ...]]:
    return [part.shape for part in jax.tree.leaves(weight)]
