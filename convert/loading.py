"""Weights from a checkpoint to their sharded place on a mesh, one parameter at a time."""

from __future__ import annotations

import functools

import jax
import numpy as np
from tqdm import tqdm

from convert.checkpoint import Checkpoint
from convert.families.table import some
from convert.placement import Leaf, Weight, fitted, lay_out, put, quantization_of
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import (
    Parameter,
    Tree,
    abstract_parameter,
    declare,
    flatten,
    is_quantized,
    to_physical,
    unflatten,
)
from meshes import sharding


def load(
    checkpoint: Checkpoint,
    abstract: Tree,
    physical: ModelConfig,
    *,
    progress: bool = True,
    title: str = "loading weights",
) -> Tree:
    """The weights of `checkpoint` as a nested dict of jax.Array, laid out for a mesh.

    `abstract`: the tree that `jaxinfer.parameters.abstract` makes of `physical`: shape, dtype and sharding of each
    leaf. A leaf that is a QuantizedArray there is quantized here, on its devices, unless it is stored so.
    `physical`: `checkpoint.config` after `for_tensor_parallel`. `progress` shows bytes on standard error.
    Host memory besides the result: one parameter and a block of a source; on CPU with one device the host array is
    the result. Device memory: the result and, to quantize, one parameter. Raises ValueError if the trees or shapes do
    not agree, or the checkpoint is quantized in another way.
    """
    leaves = dict(flatten(abstract))
    _check(leaves, physical, checkpoint)
    total = sum(_nbytes(leaf) for leaf in leaves.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc=title, disable=None if progress else True) as bar:
        if checkpoint.format == "native":
            from convert.native import restore

            loaded = restore(checkpoint, leaves, physical, bar.update)
        else:
            loaded, dtype = {}, leaves["embed.weight"].dtype
            # The largest first: at its peak each needs a second copy, which is dearest when memory is fullest.
            for path, leaf in sorted(leaves.items(), key=lambda item: -_nbytes(item[1])):
                loaded[path] = _load(path, checkpoint, dtype, physical, leaf)
                bar.update(_nbytes(leaf))
    return unflatten({path: loaded[path] for path in leaves})


def _load(path: str, checkpoint: Checkpoint, dtype: np.dtype, physical: ModelConfig, leaf: Leaf) -> Weight:
    """dtype: in which a weight is read that is to be quantized."""
    if not is_quantized(leaf):
        array = to_physical(path, checkpoint.read(path, leaf.dtype), checkpoint.config, physical)
        return put(array, leaf.sharding)
    config, place = checkpoint.config, functools.partial(sharding, leaf.values.sharding.mesh)
    canonical = fitted(abstract_parameter(dict(flatten(declare(config)))[path], dtype, place, None))
    return lay_out(path, put(checkpoint.read(path, dtype), canonical.sharding), config, physical, leaf)


def _check(leaves: dict[str, Leaf], physical: ModelConfig, checkpoint: Checkpoint) -> None:
    declared = dict(flatten(declare(physical)))
    if odd := sorted(declared.keys() ^ leaves.keys()):
        raise ValueError(f"the abstract tree and the config do not have the same parameters: {some(odd)}")
    wrong = [
        f"{path} {_shapes(leaf)}" for path, leaf in leaves.items() if _shapes(leaf) != _declared(declared[path], leaf)
    ]
    if wrong:
        raise ValueError(f"abstract shapes are not those that the config declares: {some(wrong)}")
    wanted = {quantization_of(leaf) for leaf in leaves.values() if is_quantized(leaf)}
    if checkpoint.quantization is not None and wanted != {checkpoint.quantization}:
        raise ValueError(
            f"{checkpoint.path} is quantized to {checkpoint.quantization.format} already; load it as it is stored, or "
            "convert the original checkpoint again"
        )


def _declared(parameter: Parameter, leaf: Leaf) -> str:
    quantization = quantization_of(leaf) if is_quantized(leaf) else None
    return _shapes(abstract_parameter(parameter, np.float32, lambda axes: None, quantization))


def _shapes(leaf: Leaf) -> str:
    return ", ".join(str(list(part.shape)) for part in jax.tree.leaves(leaf))


def _nbytes(leaf: Leaf) -> int:
    return sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in jax.tree.leaves(leaf))
