"""The native checkpoint: canonical arrays in Orbax's format, which any mesh restores.

A folder with `jaxinfer.json` (format version, dtype, ModelConfig), `weights/` (Orbax) and `tokenizer/` if there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from convert.checkpoint import NUMPY_DTYPES, Checkpoint
from convert.loading import load
from convert.manifest import FILE_NAME, Manifest
from convert.placement import Leaf, Weight, fitted, lay_out
from convert.tokenizer import NATIVE_FOLDER
from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import (
    abstract,
    flatten,
    is_quantized,
    parts_of,
    resolve,
    stored_parts,
)
from meshes import build_mesh, sharding

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
_CHUNK_BYTES = 64 << 20  # big arrays are cut, for shards to read; smaller pieces fragment the heap they pass through
_BATCH_BYTES = 64 << 20  # restored together: Orbax holds host copies of what one call reads


def save_native(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    tokenizer: Any = None,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Write `checkpoint` as a native one at `path`, complete or not at all; returns the path.

    `dtype`: "float32", "bfloat16" or "float16"; None: the checkpoint's own. `quantization`: of the projections.
    `tokenizer`: anything with `save_pretrained(folder)`. Holds the model, as it is written, in memory once. Raises
    FileExistsError if `path` exists, unless `force` replaces a native checkpoint or an empty folder; ValueError for an
    unknown dtype, groups that do not divide the model, or a checkpoint already native, or already quantized.
    """
    path, dtype = Path(path).expanduser(), dtype or checkpoint.dtype
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"dtype '{dtype}' is not supported; supported: {', '.join(NUMPY_DTYPES)}")
    if checkpoint.quantization is not None:
        raise ValueError(f"{checkpoint.path} is quantized to {checkpoint.quantization.format} already; copy the folder")
    if checkpoint.format == "native" and quantization is None:
        raise ValueError(f"{checkpoint.path} is a native checkpoint already; copy the folder")
    check_destination(path, force)
    quantization = resolve(checkpoint.config, quantization)
    host = build_mesh(devices=jax.local_devices(backend="cpu")[:1])
    leaves = abstract(checkpoint.config, NUMPY_DTYPES[dtype], functools.partial(sharding, host), quantization)
    loaded = load(checkpoint, leaves, checkpoint.config, progress=progress, title="converting")
    weights = {name: part for leaf, weight in flatten(loaded) for name, part in stored_parts(leaf, weight).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        building.mkdir()
        with _checkpointer() as checkpointer:
            save_args = dict.fromkeys(weights, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
            checkpointer.save(building.absolute() / WEIGHTS, args=ocp.args.PyTreeSave(weights, save_args=save_args))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(building / NATIVE_FOLDER))
        Manifest(checkpoint.config, dtype, quantization).write(building)
        if path.exists():
            shutil.rmtree(path)
        building.rename(path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info("wrote %s: %.1f MB of weights", path, sum(part.nbytes for part in weights.values()) / 1e6)
    return path


def restore(
    checkpoint: Checkpoint, leaves: dict[str, Leaf], physical: ModelConfig, update: Callable[[int], object]
) -> dict[str, Weight]:
    """Path → weight for the leaves, from a native checkpoint; `update` takes the bytes done.

    Each array is read straight to its devices in its canonical shape. Where the mesh needs another shape (padded
    vocabulary, replicated kv heads), it is read sharded as far as that shape divides and changed on the devices; where
    a leaf is to be quantized, it is there.
    """
    embed, restored = leaves["embed.weight"], {}
    place = functools.partial(sharding, embed.sharding.mesh)
    stored = dict(flatten(abstract(checkpoint.config, embed.dtype, place, checkpoint.quantization)))
    canonical = {path: fitted(stored[path]) for path in leaves}
    with _checkpointer() as checkpointer:
        for batch in _batches(canonical):
            parts = {name: part for path in batch for name, part in stored_parts(path, canonical[path]).items()}
            restore_args = {
                name: ocp.ArrayRestoreArgs(dtype=part.dtype, sharding=part.sharding, global_shape=part.shape)
                for name, part in parts.items()
            }
            arrays = checkpointer.restore(
                checkpoint.path.absolute() / WEIGHTS,
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(parts, 0), restore_args=restore_args, partial_restore=True
                ),
            )
            for path in batch:
                weight = _weight(path, canonical[path], arrays)
                for array in jax.tree.leaves(weight):
                    _check_range(path, array, checkpoint.dtype)
                restored[path] = lay_out(path, weight, checkpoint.config, physical, leaves[path])
                update(sum(part.nbytes for part in jax.tree.leaves(restored[path])))
    return restored


def _weight(path: str, stored: Leaf, arrays: dict[str, jax.Array]) -> Weight:
    """The weight of this path, taken out of the arrays."""
    if not is_quantized(stored):
        return arrays.pop(path)
    return dataclasses.replace(stored, **{name: arrays.pop(f"{path}.{name}") for name in parts_of(stored)})


def _check_range(path: str, array: jax.Array, stored: str) -> None:
    if array.dtype == np.float16 and stored != "float16" and np.isinf(array.max()) | np.isinf(array.min()):
        raise ValueError(f"{path} has values beyond float16's 65504; use bfloat16 or float32")


def _batches(leaves: dict[str, Leaf]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for path, leaf in leaves.items():
        nbytes = sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in jax.tree.leaves(leaf))
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += nbytes
    yield batch


def check_destination(path: Path, force: bool) -> None:
    """Raises FileExistsError unless a native checkpoint may be written at `path`."""
    if not path.exists():
        return
    if not force:
        raise FileExistsError(f"{path} exists; choose another place, or pass --force to replace it")
    if not path.is_dir() or (any(path.iterdir()) and not (path / FILE_NAME).exists()):
        raise FileExistsError(f"{path} is not a native checkpoint, so it is not replaced; remove it yourself")


@contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """Compression off: weights are noise to it."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    try:
        yield checkpointer
    finally:
        checkpointer.close()
