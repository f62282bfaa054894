"""One canonical weight to its place on a mesh: quantized if asked for, and in the shape that the mesh runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import declare, flatten, is_quantized, quantized, to_physical

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
    # The same for every layer, so that one program serves them all.
    change = _changer(re.sub(r"\d+", "0", path), config, physical, leaf, is_quantized(weight))
    return jax.block_until_ready(change(weight))


def fitted(leaf: Leaf) -> Leaf:
    """The leaf in shards as far as its shape divides: without the mesh axes that do not divide their dimension."""
    return jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=_fitting(part.sharding, part.shape)), leaf
    )


def _fitting(where: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    sizes = dict(where.mesh.shape)
    spec = [
        axis if axis is None or dim % sizes[axis] == 0 else None
        for dim, axis in zip(shape, (*where.spec, *[None] * len(shape)))
    ]
    return NamedSharding(where.mesh, PartitionSpec(*spec))


def quantization_of(leaf: Leaf) -> Quantization:
    """What made, or is to make, a quantized leaf."""
    return Quantization(leaf.format, leaf.group_size, leaf.format != "int4" or leaf.zeros is None)


@functools.cache
def _changer(
    path: str, config: ModelConfig, physical: ModelConfig, leaf: Leaf, stored: bool
) -> Callable[[Weight], Weight]:
    parameter = dict(flatten(declare(config)))[path]

    def change(weight: Weight) -> Weight:
        if is_quantized(leaf) and not stored:
            weight = quantized(weight, parameter, quantization_of(leaf))
        return to_physical(path, weight, config, physical)

    return jax.jit(change, out_shardings=jax.tree.map(lambda part: part.sharding, leaf))


def _shapes(weight: Weight | Leaf) -> list[tuple[int, ...]]:
    return [part.shape for part in jax.tree.leaves(weight)]
