"""The native checkpoint: canonical arrays in Orbax's format, which any mesh restores.

A folder with `jaxinfer.json` (format version, dtype, ModelConfig), `weights/` (Orbax) and `tokenizer/` if there is one.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from convert.checkpoint import NUMPY_DTYPES, Checkpoint
from convert.manifest import FILE_NAME, Manifest
from convert.tokenizer import NATIVE_FOLDER
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import declare, flatten, to_physical

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
_CHUNK_BYTES = 64 << 20  # big arrays are cut, for shards to read; smaller pieces fragment the heap they pass through
_BATCH_BYTES = 64 << 20  # restored together: Orbax holds host copies of what one call reads


def save_native(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    tokenizer: Any = None,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Write `checkpoint` as a native one at `path`, complete or not at all; returns the path.

    `dtype`: "float32", "bfloat16" or "float16"; None: the checkpoint's own. `tokenizer`: anything with
    `save_pretrained(folder)`. Holds the model in memory once. Raises FileExistsError if `path` exists, unless `force`
    replaces a native checkpoint or an empty folder; ValueError for an unknown dtype or a checkpoint already native.
    """
    path, dtype = Path(path).expanduser(), dtype or checkpoint.dtype
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"dtype '{dtype}' is not supported; supported: {', '.join(NUMPY_DTYPES)}")
    if checkpoint.format == "native":
        raise ValueError(f"{checkpoint.path} is a native checkpoint already; copy the folder")
    check_destination(path, force)
    weights: dict[str, jax.Array] = {}
    host = jax.local_devices(backend="cpu")[0]  # Orbax would copy a numpy array
    leaves = dict(flatten(declare(checkpoint.config)))
    total = sum(int(np.prod(leaf.shape)) for leaf in leaves.values()) * NUMPY_DTYPES[dtype].itemsize
    with tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=None if progress else True) as bar:
        for name in leaves:
            weights[name] = jax.device_put(checkpoint.read(name, NUMPY_DTYPES[dtype]), host, may_alias=True)
            bar.update(weights[name].nbytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        building.mkdir()
        with _checkpointer() as checkpointer:
            save_args = dict.fromkeys(weights, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
            checkpointer.save(building.absolute() / WEIGHTS, args=ocp.args.PyTreeSave(weights, save_args=save_args))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(building / NATIVE_FOLDER))
        Manifest(checkpoint.config, dtype).write(building)
        if path.exists():
            shutil.rmtree(path)
        building.rename(path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info("wrote %s: %.1f MB of %s weights", path, total / 1e6, dtype)
    return path


def restore(
    checkpoint: Checkpoint, leaves: dict[str, Any], physical: ModelConfig, update: Callable[[int], object]
) -> dict[str, jax.Array]:
    """Path → array for the `jax.ShapeDtypeStruct` leaves, from a native checkpoint; `update` takes the bytes done.

    Each array is read straight to its devices in its canonical shape. Where the mesh needs another shape (padded
    vocabulary, replicated kv heads), it is read sharded as far as that shape divides and changed on the devices.
    """
    canonical = dict(flatten(declare(checkpoint.config)))
    restored = {}
    with _checkpointer() as checkpointer:
        for batch in _batches(leaves):
            restore_args = {
                path: ocp.ArrayRestoreArgs(
                    dtype=leaves[path].dtype,
                    sharding=_fitting(leaves[path].sharding, canonical[path].shape),
                    global_shape=canonical[path].shape,
                )
                for path in batch
            }
            arrays = checkpointer.restore(
                checkpoint.path.absolute() / WEIGHTS,
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(batch, 0), restore_args=restore_args, partial_restore=True
                ),
            )
            for path in batch:
                _check_range(path, arrays[path], checkpoint.dtype)
                restored[path] = _to_physical(path, arrays.pop(path), checkpoint.config, physical, leaves[path])
                update(restored[path].nbytes)
    return restored


def _check_range(path: str, array: jax.Array, stored: str) -> None:
    if array.dtype == np.float16 and stored != "float16" and np.isinf(array.max()) | np.isinf(array.min()):
        raise ValueError(f"{path} has values beyond float16's 65504; use bfloat16 or float32")


def _to_physical(path: str, array: jax.Array, config: ModelConfig, physical: ModelConfig, leaf: Any) -> jax.Array:
    if array.shape == leaf.shape:
        return array
    # The same for every layer, so that one program serves them all.
    change = _changer(re.sub(r"\d+", "0", path), config, physical, leaf.sharding)
    return change(array).block_until_ready()


@functools.cache
def _changer(
    path: str, config: ModelConfig, physical: ModelConfig, sharding: NamedSharding
) -> Callable[..., jax.Array]:
    return jax.jit(lambda canonical: to_physical(path, canonical, config, physical), out_shardings=sharding)


def _fitting(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding, without the mesh axes that do not divide their dimension."""
    sizes = dict(sharding.mesh.shape)
    spec = [
        axis if axis is None or dim % sizes[axis] == 0 else None
        for dim, axis in zip(shape, (*sharding.spec, *[None] * len(shape)))
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _batches(leaves: dict[str, Any]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for path, leaf in leaves.items():
        nbytes = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
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
