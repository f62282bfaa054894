"""Checkpoints out: a Hugging Face folder, whose tensors are bit for bit those that the checkpoint was made of."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from convert import export_gptq, safetensors_writer
from convert.checkpoint import NUMPY_DTYPES, Checkpoint, check_range, rows_per_block
from convert.destination import check_destination, fingerprint, resumable
from convert.families import family_of
from convert.manifest import CONFIGS, HUGGING_FACE, NAMES
from convert.safetensors_writer import Outgoing
from convert.sentence import copy_sentence_files
from convert.shards import load_json
from convert.tensors import DTYPES, FILE_DTYPES, Reader
from convert.tokenizer import NATIVE_FOLDER
from convert.transforms import Transform
from jaxinfer.parameters import declare, flatten, is_stored_in

_BESIDES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_NOT_BESIDES = ("*.index.json", *CONFIGS, "adapter_config.json")
_SHARD_BYTES = 5_000_000_000
type Blocks = Iterator[np.ndarray]
_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


def save_safetensors(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    force: bool = False,
    progress: bool = True,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Write `checkpoint` as a Hugging Face folder at `path`, complete or not at all; returns the path.

    `dtype`: "float32", "bfloat16" or "float16"; None: each tensor's own, and the checkpoint's for a quantized one.
    The tokenizer's files are copied. Files that an interrupted call finished are kept, as by `save_native`. Raises
    FileExistsError and OSError as `save_native` does, and ValueError for a checkpoint that we quantized to 8 bits (int4
    is written as GPTQ), or that was made of a GGUF file, which has no config.json.
    """
    from convert.loading import progress_bar

    path = Path(path).expanduser()
    if dtype is not None and dtype not in NUMPY_DTYPES:
        raise ValueError(f"dtype '{dtype}' is not supported; supported: {', '.join(NUMPY_DTYPES)}")
    configs, values, tensors = _outgoing(checkpoint, dtype)
    check_destination(path, force, checkpoint, sum(tensor.nbytes for tensor in tensors))
    same = fingerprint(checkpoint, format="safetensors", dtype=dtype, shard_bytes=shard_bytes)
    with resumable(path, same) as finished:
        building = finished.folder
        with progress_bar(sum(tensor.nbytes for tensor in tensors), "exporting", progress) as bar:
            safetensors_writer.write(building, tensors, shard_bytes, bar.update, finished)
        _copy_besides(checkpoint, building)
        if (configs / CONFIGS[1]).is_file():
            shutil.copy(configs / CONFIGS[1], building)
        # Last, so that what is not complete does not load.
        (building / CONFIGS[0]).write_text(json.dumps(_config(values, dtype, checkpoint), indent=2) + "\n")
    return path


def plan_safetensors(checkpoint: Checkpoint, dtype: str | None) -> Iterator[str]:
    """A line for each tensor that `save_safetensors` would write, with its size, and the total; raises as it does."""
    _, _, tensors = _outgoing(checkpoint, dtype)
    for tensor in tensors:
        yield f"{tensor.name} {list(tensor.shape)} {tensor.dtype}, {tensor.nbytes / 1e6:.3f} MB"
    total = sum(tensor.nbytes for tensor in tensors)
    yield f"{checkpoint.path}: {len(tensors)} tensors, {total / 1e6:.1f} MB"


def _outgoing(checkpoint: Checkpoint, dtype: str | None) -> tuple[Path, dict[str, Any], list[Outgoing]]:
    """The folder of the configs, what is in config.json, and the tensors to write."""
    native = checkpoint.format == "native"
    quantization = checkpoint.quantization
    if native and quantization is not None and quantization.format != "int4":
        raise ValueError(f"{checkpoint.path} is quantized to {quantization.format}; export the original")
    configs = checkpoint.path / HUGGING_FACE if native else checkpoint.path
    if not (configs / CONFIGS[0]).is_file():
        raise ValueError(
            f"{checkpoint.path} has no config.json, which a Hugging Face folder needs: was it GGUF or Megatron's?"
        )
    values = load_json((configs / CONFIGS[0]).read_bytes(), str(configs))
    tensors = _of_native(checkpoint, values, dtype or checkpoint.dtype) if native else _of_reader(checkpoint, dtype)
    return configs, values, list(tensors)


def _of_reader(checkpoint: Checkpoint, dtype: str | None) -> Iterator[Outgoing]:
    """The tensors that the model is made of, read and written block by block."""
    reader = checkpoint.reader
    assert reader is not None
    names = dict.fromkeys(name for source in checkpoint.sources.values() for name in source.names)
    for name in names:
        info = reader.tensors[name]
        own = info.dtype if info.dtype in DTYPES else _NAMES[checkpoint.dtype]
        written = own if dtype is None else _NAMES[dtype]
        yield Outgoing(name, info.shape, written, functools.partial(_blocks, reader, name, FILE_DTYPES[written]))


def _blocks(reader: Reader, name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
    info = reader.tensors[name]
    step = rows_per_block(info)
    for start in range(0, info.shape[0], step):
        block = reader.read(name, start, min(start + step, info.shape[0]))
        check_range(name, block, dtype)
        yield block.astype(dtype)


def _of_native(checkpoint: Checkpoint, values: dict[str, Any], dtype: str) -> Iterator[Outgoing]:
    """The tensors that the weights were fused from: each weight is read once, and the tensors are views of it."""
    from convert.native import one_by_one

    config = checkpoint.config
    stored = checkpoint.path / HUGGING_FACE / NAMES
    names = load_json(stored.read_bytes(), str(stored))
    table = family_of(values, str(checkpoint.path)).rows(config, ())
    read, read_int4 = one_by_one(checkpoint, dtype)
    for path, parameter in flatten(declare(config)):
        transform = table[re.sub(r"\d+", "{}", path, count=1)].transform
        quantization = checkpoint.quantization
        if quantization is not None and is_stored_in(parameter, quantization):
            parts = functools.partial(read_int4, path)
            yield from export_gptq.outgoing(names[path], parameter, transform, config, quantization, parts)
            continue
        slots = transform(np.broadcast_to(np.uint8(0), parameter.shape), config)
        for position, (name, slot) in enumerate(zip(names[path], slots, strict=True)):

            def block(path: str = path, transform: Transform = transform, position: int = position) -> Blocks:
                yield transform(read(path), config)[position].read()

            yield Outgoing(name, slot.shape, _NAMES[dtype], block)


def _config(values: dict[str, Any], dtype: str | None, checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of what is written: quantized by us or not at all, and of this dtype."""
    quantization = checkpoint.quantization if checkpoint.format == "native" else None
    kept = {name: value for name, value in values.items() if name not in ("quantization_config", "compression_config")}
    if quantization is not None:
        kept["quantization_config"] = export_gptq.quantization_config(quantization)
    return kept if dtype is None else {**kept, "dtype" if "dtype" in kept else "torch_dtype": dtype}


def _copy_besides(checkpoint: Checkpoint, building: Path) -> None:
    """The tokenizer's files, and the others that are not weights."""
    copy_sentence_files(checkpoint.path, building)
    folder = checkpoint.path / NATIVE_FOLDER if checkpoint.format == "native" else checkpoint.path
    for pattern in _BESIDES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and not any(file.match(other) for other in _NOT_BESIDES):
                shutil.copy(file, building)
