"""Weights from a checkpoint to their sharded place on a mesh, one parameter at a time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from convert.checkpoint import Checkpoint
from convert.families.table import some
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Tree, declare, flatten, to_physical, unflatten


def load(checkpoint: Checkpoint, abstract: Tree, physical: ModelConfig, *, progress: bool = True) -> Tree:
    """The weights of `checkpoint` as a nested dict of jax.Array, laid out for a mesh.

    `abstract`: the tree of `declare(physical)` with a `jax.ShapeDtypeStruct` (shape, dtype, sharding) for each leaf.
    `physical`: `checkpoint.config` after `for_tensor_parallel`. `progress` shows bytes on standard error.
    Host memory besides the result: one parameter and a block of a source; on CPU with one device the host array is
    the result. Raises ValueError if the trees or shapes do not agree.
    """
    leaves = dict(flatten(abstract))
    _check(leaves, physical)
    total = sum(_nbytes(leaf) for leaf in leaves.values())
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading weights", disable=None if progress else True
    ) as bar:
        if checkpoint.format == "native":
            from convert.native import restore

            loaded = restore(checkpoint, leaves, physical, bar.update)
        else:
            loaded = {}
            # The largest first: at its peak each needs a second copy, which is dearest when memory is fullest.
            for path, leaf in sorted(leaves.items(), key=lambda item: -_nbytes(item[1])):
                loaded[path] = _place(
                    to_physical(path, checkpoint.read(path, leaf.dtype), checkpoint.config, physical), leaf
                )
                bar.update(_nbytes(leaf))
    return unflatten({path: loaded[path] for path in leaves})


def _place(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """The array on the devices of its sharding; waits, so that the host copy can go before the next is made."""
    sharding: Any = leaf.sharding
    if len(sharding.device_set) == 1:
        placed = jax.device_put(array, sharding, may_alias=True)
    else:
        placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return placed.block_until_ready()


def _check(leaves: dict[str, Any], physical: ModelConfig) -> None:
    declared = {path: parameter.shape for path, parameter in flatten(declare(physical))}
    if odd := sorted(declared.keys() ^ leaves.keys()):
        raise ValueError(f"the abstract tree and the config do not have the same parameters: {some(odd)}")
    wrong = [f"{path} {list(leaf.shape)}" for path, leaf in leaves.items() if leaf.shape != declared[path]]
    if wrong:
        raise ValueError(f"abstract shapes are not those that the config declares: {some(wrong)}")


def _nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(leaf.shape)) * leaf.dtype.itemsize
