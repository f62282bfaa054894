"""Weights from a checkpoint to their sharded place on a mesh, one parameter at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from convert.ahead import made_ahead
from convert.checkpoint import Checkpoint, rows_per_block
from convert.families.table import some
from convert.low_bit import low_bits, read_parts
from convert.placement import Leaf, Weight, fitted, is_split, lay_out, put, quantization_of
from convert.quantized.layer import DequantizingReader
from convert.slices import needed
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
from pallas_kernels.formats import pack_int4

_AHEAD_BYTES = 512 << 20
"""The largest weight that is read while another, as large or larger, is copied to its devices."""


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
    Host memory besides the result: one parameter, the next if it has no more than `_AHEAD_BYTES`, and a few blocks of
    a source; on CPU with one device the host array is the result. Device memory: the result and, to quantize, one
    parameter. Raises ValueError if the trees or shapes do not agree, or the checkpoint is quantized in another way.
    """
    leaves = dict(flatten(abstract))
    _check(leaves, physical, checkpoint)
    total = sum(_nbytes(leaf) for leaf in leaves.values())
    with progress_bar(total, title, progress) as bar:
        if checkpoint.format == "native":
            from convert.native import restore

            loaded = restore(checkpoint, leaves, physical, bar.update)
        else:
            loaded = {}
            # The largest first: at its peak each needs a second copy, which is dearest when memory is fullest.
            paths = sorted(leaves, key=lambda path: -_nbytes(leaves[path]))
            read = functools.partial(_read, checkpoint=checkpoint, leaves=leaves, physical=physical)
            for path, place in made_ahead(paths, read, lambda path: _nbytes(leaves[path]) <= _AHEAD_BYTES):
                loaded[path] = place()
                del place
                bar.update(_nbytes(leaves[path]))
    return unflatten({path: loaded[path] for path in leaves})


def progress_bar(total: int, title: str, shown: bool) -> tqdm:
    """Of `total` bytes, on standard error: done, rate and time left. Only where that is a terminal."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=title, disable=None if shown else True)


def load_one(path: str, checkpoint: Checkpoint, leaves: dict[str, Leaf], physical: ModelConfig) -> Weight:
    """One weight, as `leaves[path]` describes it; the arguments are those of `load`."""
    if checkpoint.format == "native":
        from convert.native import restore

        return restore(checkpoint, leaves, physical, lambda nbytes: None, [path])[path]
    return _read(path, checkpoint, leaves, physical)()


def _read(path: str, checkpoint: Checkpoint, leaves: dict[str, Leaf], physical: ModelConfig) -> Callable[[], Weight]:
    """Reads a weight into host memory; what is returned puts it onto its devices, once."""
    make = _keep if is_quantized(leaves[path]) and _is_kept(path, checkpoint, leaves[path]) else _load
    return make(path, checkpoint, leaves["embed.weight"].dtype, physical, leaves[path])


def _is_kept(path: str, checkpoint: Checkpoint, leaf: Leaf) -> bool:
    """Whether the checkpoint stores this weight as the leaf is to be."""
    stored = checkpoint.quantization
    same = stored is not None and stored.of_one == quantization_of(leaf)
    return same and checkpoint.reader is not None and bool(low_bits(checkpoint.sources[path], checkpoint.reader))


def _keep(
    path: str, checkpoint: Checkpoint, dtype: np.dtype, physical: ModelConfig, leaf: Leaf
) -> Callable[[], Weight]:
    """A weight that stays in the format in which others stored it."""
    config, by_axes = checkpoint.config, functools.partial(sharding, leaf.values.sharding.mesh)
    parameter = dict(flatten(declare(config)))[path]
    where = fitted(abstract_parameter(parameter, dtype, by_axes, quantization_of(leaf)))
    canonical = fitted(abstract_parameter(parameter, dtype, by_axes, None))
    wanted = None
    if not any(is_split(part.sharding) for part in jax.tree.leaves((where, canonical))):
        wanted = needed(path, parameter, config, config, canonical, canonical.sharding.addressable_devices)
    source, reader = checkpoint.sources[path], checkpoint.reader
    assert isinstance(reader, DequantizingReader)
    block = rows_per_block(reader.tensors[source.names[0]])
    parts = read_parts(parameter, source, reader, config, where, block, wanted)
    if leaf.format == "int4":
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            # Packing takes several times what it packs, so experts are packed one at a time.
            pieces = parts["values"] if parameter.batch else [parts["values"]]
            packed = [np.asarray(pack_int4(jnp.asarray(piece))) for piece in pieces]
        parts["values"] = np.stack(packed) if parameter.batch else packed[0]

    def place() -> Weight:
        placed = {name: put(parts.pop(name), getattr(where, name).sharding) for name in list(parts)}
        return lay_out(path, dataclasses.replace(where, **placed), config, physical, leaf)

    return place


def _load(
    path: str, checkpoint: Checkpoint, dtype: np.dtype, physical: ModelConfig, leaf: Leaf
) -> Callable[[], Weight]:
    """dtype: in which a weight is read that is to be quantized."""
    config = checkpoint.config
    parameter = dict(flatten(declare(config)))[path]
    if not is_quantized(leaf):
        wanted = needed(path, parameter, config, physical, leaf, leaf.sharding.addressable_devices)
        array = to_physical(path, checkpoint.read(path, leaf.dtype, wanted), config, physical)
        return functools.partial(put, array, leaf.sharding)
    place = functools.partial(sharding, leaf.values.sharding.mesh)
    canonical = fitted(abstract_parameter(parameter, dtype, place, None))
    wanted = needed(path, parameter, config, config, canonical, canonical.sharding.addressable_devices)
    host = [checkpoint.read(path, dtype, wanted)]
    # Popped, so that it goes once it is on the devices.
    return lambda: lay_out(path, put(host.pop(), canonical.sharding), config, physical, leaf)


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
    stored = checkpoint.quantization
    if checkpoint.format == "native" and stored is not None and wanted != {stored.of_one}:
        raise ValueError(
            f"{checkpoint.path} is quantized to {stored.format} already; load it as it is stored, or "
            "convert the original checkpoint again"
        )


def _declared(parameter: Parameter, leaf: Leaf) -> str:
    quantization = quantization_of(leaf) if is_quantized(leaf) else None
    return _shapes(abstract_parameter(parameter, np.float32, lambda axes: None, quantization))


def _shapes(leaf: Leaf) -> str:
    return ", ".join(str(list(part.shape)) for part in jax.tree.leaves(leaf))


def _nbytes(leaf: Leaf) -> int:
    return sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in jax.tree.leaves(leaf))
