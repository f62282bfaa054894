"""The native checkpoint: canonical arrays in Orbax's format, which any mesh restores.

A folder with `jaxinfer.json` (format version, dtype, ModelConfig), `weights/` (Orbax) and `tokenizer/` if there is one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from convert import late
from convert.ahead import several_ahead
from convert.checkpoint import NUMPY_DTYPES, Checkpoint
from convert.destination import check_destination, fingerprint, resumable
from convert.loading import load_one, progress_bar
from convert.manifest import CONFIGS, HUGGING_FACE, NAMES, Manifest
from convert.placement import Leaf, Weight, fitted, lay_out, sharded_axis, shares
from convert.plan import check_source
from convert.sentence import copy_sentence_files
from convert.tokenizer import NATIVE_FOLDER
from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import (
    Tree,
    abstract,
    flatten,
    is_quantized,
    parts_of,
    resolve,
    stored_parts,
)
from meshes import build_mesh, sharding
from pallas_kernels.formats import unpack_int4

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
_CHUNK_BYTES = 64 << 20
"""The largest piece of an array that is stored, and read, as one."""
_SHARES = 8
"""Arrays are cut as a mesh of so many devices divides them, or of half or a quarter: each reads what it needs."""
_SMALLEST_BYTES = 256 << 10
"""An array that is not cut: its pieces would cost more time than they save."""
_BATCH_BYTES = 128 << 20
"""Of arrays that are restored together: each call of Orbax reads the checkpoint's description again."""
_AHEAD_BYTES = 512 << 20
"""Of batches that are restored at once: while one is copied to its devices, others come from the disk. Orbax holds
copies of them on the host."""


def save_native(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    quantization: Quantization | None = None,
    ready: Mapping[str, Weight] | None = None,
    ready_of: str = "",
    tokenizer: Any = None,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Write `checkpoint` as a native one at `path`, complete or not at all; returns the path.

    `dtype`: "float32", "bfloat16" or "float16"; None: the checkpoint's own. `quantization`: of the projections.
    `ready`: path → weights that are quantized already, in place of the checkpoint's rounded to nearest.
    `tokenizer`: anything with `save_pretrained(folder)`. Holds one weight in memory at a time. What an interrupted
    call wrote is checked and kept, if source and settings are still the same, and `ready_of`, which says what the
    weights that are ready were made of; without it nothing is kept where there are such weights. Raises
    FileExistsError if `path` exists, unless `force` replaces a native checkpoint or an empty folder, and if it is or
    holds the checkpoint; OSError if its disk has less room than the weights take; ValueError for an
    unknown dtype, groups that do not divide the model, or a checkpoint already native, or already quantized.
    """
    path, dtype = Path(path).expanduser(), dtype or checkpoint.dtype
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"dtype '{dtype}' is not supported; supported: {', '.join(NUMPY_DTYPES)}")
    check_source(checkpoint, quantization)
    quantization = checkpoint.quantization or resolve(checkpoint.config, quantization)
    host = build_mesh(devices=jax.local_devices(backend="cpu")[:1])
    leaves = abstract(checkpoint.config, NUMPY_DTYPES[dtype], functools.partial(sharding, host), quantization)
    arrays = _late(checkpoint, leaves, ready or {})
    total = sum(array.nbytes for array in arrays.values())
    check_destination(path, force, checkpoint, total)
    settings = {"dtype": dtype, "quantization": quantization, "ready_of": ready_of, "pieces": _SHARES}
    same = None if ready and not ready_of else fingerprint(checkpoint, **settings)
    with resumable(path, same) as finished:
        building = finished.folder
        with progress_bar(total, "converting", progress) as bar:
            late.save(building.absolute() / WEIGHTS, arrays, bar.update, finished)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(building / NATIVE_FOLDER))
        _keep_configs(checkpoint, building / HUGGING_FACE)
        Manifest(checkpoint.config, dtype, quantization).write(building)
    logger.info("wrote %s: %.1f MB of weights", path, total / 1e6)
    return path


def _late(checkpoint: Checkpoint, leaves: Tree, ready: Mapping[str, Weight]) -> dict[str, late.LateArray]:
    """The arrays of the checkpoint's weights, each made when it is asked for.

    The parts of a quantized weight are asked for one after the other, and made once.
    """
    weights, made = dict(flatten(leaves)), dict[str, dict[str, Any]]()

    def make(path: str, name: str) -> np.ndarray:
        if path not in made:
            made.clear()  # before the next is made, so that there is room for one only
            weight = ready[path] if path in ready else load_one(path, checkpoint, weights, checkpoint.config)
            made[path] = stored_parts(path, weight)
        return np.asarray(made[path].pop(name))

    return {
        name: late.LateArray(part.shape, np.dtype(part.dtype), functools.partial(make, path, name), _chunk(part))
        for path, leaf in weights.items()
        for name, part in stored_parts(path, leaf).items()
    }


def _chunk(part: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of the pieces of an array, all alike."""
    chunk, axis = list(part.shape), sharded_axis(part.sharding.spec)
    nbytes = part.size * part.dtype.itemsize
    if axis is not None and nbytes > _SMALLEST_BYTES:
        own, other = shares(part.shape, axis, _SHARES)
        chunk[axis] //= own
        if other is not None:
            chunk[other] //= math.gcd(part.shape[other], _SHARES // own)
    while math.prod(chunk) * part.dtype.itemsize > _CHUNK_BYTES:
        # By the smallest factor that there is: a vocabulary may be a prime.
        factor, _, largest = min((_smallest_factor(size), -size, axis) for axis, size in enumerate(chunk) if size > 1)
        chunk[largest] //= factor
    return tuple(chunk)


def _smallest_factor(size: int) -> int:
    return next((n for n in range(2, math.isqrt(size) + 1) if size % n == 0), size)


def _keep_configs(checkpoint: Checkpoint, folder: Path) -> None:
    """Those of Hugging Face and the names of its tensors, which an export needs."""
    if checkpoint.format == "native":
        if (checkpoint.path / HUGGING_FACE).is_dir():
            shutil.copytree(checkpoint.path / HUGGING_FACE, folder, dirs_exist_ok=True)
    elif checkpoint.format not in ("gguf", "megatron"):
        folder.mkdir(exist_ok=True)
        for name in CONFIGS:
            if (checkpoint.path / name).is_file():
                shutil.copy(checkpoint.path / name, folder)
        copy_sentence_files(checkpoint.path, folder)
        names = {path: source.names for path, source in checkpoint.sources.items()}
        (folder / NAMES).write_text(json.dumps(names, indent=1) + "\n")


def one_by_one(
    checkpoint: Checkpoint, dtype: str
) -> tuple[Callable[[str], np.ndarray], Callable[[str], dict[str, np.ndarray]]]:
    """Two that read the weights of a native checkpoint by their paths, and keep the last.

    The first gives arrays; the second, of a weight in int4, its values, unpacked, scales and zeros.
    """
    host = build_mesh(devices=jax.local_devices(backend="cpu")[:1])
    tree = abstract(checkpoint.config, NUMPY_DTYPES[dtype], functools.partial(sharding, host), checkpoint.quantization)
    leaves = dict(flatten(tree))

    def read(path: str) -> np.ndarray:
        return np.asarray(load_one(path, checkpoint, leaves, checkpoint.config))

    def read_int4(path: str) -> dict[str, np.ndarray]:
        weight = load_one(path, checkpoint, leaves, checkpoint.config)
        scales = np.asarray(weight.scales)
        zeros = np.zeros_like(scales) if weight.zeros is None else np.asarray(weight.zeros)
        return {"values": np.asarray(unpack_int4(weight.values)), "scales": scales, "zeros": zeros}

    return _keeping_last(read), _keeping_last(read_int4)


def _keeping_last[T](make: Callable[[str], T]) -> Callable[[str], T]:
    """The same, made once if asked for again; the last goes before the next is made, so that there is room for one."""
    kept: dict[str, T] = {}

    def read(path: str) -> T:
        if path not in kept:
            kept.clear()
            kept[path] = make(path)
        return kept[path]

    return read


def restore(
    checkpoint: Checkpoint,
    leaves: dict[str, Leaf],
    physical: ModelConfig,
    update: Callable[[int], object],
    paths: Iterable[str] | None = None,
) -> dict[str, Weight]:
    """Path → weight for the leaves, or some of them, from a native checkpoint; `update` takes the bytes done.

    Each array is read straight to its devices in its canonical shape. Where the mesh needs another shape (padded
    vocabulary, replicated kv heads), it is read sharded as far as that shape divides and changed on the devices; where
    a leaf is to be quantized, it is there.
    """
    embed, restored = leaves["embed.weight"], {}
    place = functools.partial(sharding, embed.sharding.mesh)
    stored = dict(flatten(abstract(checkpoint.config, embed.dtype, place, checkpoint.quantization)))
    canonical = {path: fitted(stored[path]) for path in paths or leaves}

    def read(batch: list[str]) -> dict[str, jax.Array]:
        parts = {name: part for path in batch for name, part in stored_parts(path, canonical[path]).items()}
        restore_args = {
            name: ocp.ArrayRestoreArgs(dtype=part.dtype, sharding=part.sharding, global_shape=part.shape)
            for name, part in parts.items()
        }
        item = ocp.args.PyTreeRestore(item=dict.fromkeys(parts, 0), restore_args=restore_args, partial_restore=True)
        with _checkpointer() as checkpointer:
            return checkpointer.restore(checkpoint.path.absolute() / WEIGHTS, args=item)

    def size(batch: list[str]) -> int:
        return sum(_nbytes(canonical[path]) for path in batch)

    for batch, arrays in several_ahead(_batches(canonical), read, size, _AHEAD_BYTES):
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
        nbytes = _nbytes(leaf)
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += nbytes
    yield batch


def _nbytes(leaf: Leaf) -> int:
    return sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in jax.tree.leaves(leaf))


@contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """Compression off: weights are noise to it."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    try:
        yield checkpointer
    finally:
        checkpointer.close()
