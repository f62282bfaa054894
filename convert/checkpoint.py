"""Opening a checkpoint: its format, config and tensor headers. Nothing here imports jax or reads a weight."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from convert import lora, manifest, megatron, safetensors_reader, torch_reader
from convert.ahead import each_ahead
from convert.families import family_of, model_config
from convert.families.table import Source, match, some
from convert.hub import resolve
from convert.low_bit import described, stored_quantization
from convert.quantized import dequantized
from convert.safetensors_reader import SafetensorsReader
from convert.shards import load_json
from convert.slices import Part, parts
from convert.tensors import DTYPES, FILE_DTYPES, FLOATS, Reader, TensorInfo, has_nan, main_dtype
from convert.torch_reader import TorchReader
from convert.transforms import Slot
from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import abstract, declare, flatten, stored_parts

logger = logging.getLogger(__name__)

NUMPY_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_SINGLES = (safetensors_reader.SINGLE, torch_reader.SINGLE)
_BLOCK_BYTES = 4 << 20  # read at a time: what is made of it stays in a core's cache until it is written to its place
_ALIGNMENT = 64  # XLA on CPU takes a host array as it is, without a copy, if it is aligned so


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; weights are read when asked for, one parameter at a time."""

    path: Path
    format: Literal["safetensors", "torch", "gguf", "native", "megatron"]
    config: ModelConfig
    """Canonical: unpadded, unreplicated."""
    dtype: str
    """The dtype most of it is stored in; float32 if that is a quantized one."""
    reader: Reader | None = field(default=None, repr=False, compare=False)
    """Source tensors under their own names; None for a native checkpoint, which Orbax reads."""
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)
    """Our path → the source tensors that fill it."""
    quantization: Quantization | None = None
    """What the projections are stored in, and kept in when they are loaded; None: floats, or what is read as floats."""
    adapter: Path | None = None
    """The folder of the adapter that is merged while it is read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The stored tensors by their names in the file; by our paths for a native checkpoint."""
        if self.reader is not None:
            return self.reader.tensors
        leaves = abstract(self.config, NUMPY_DTYPES[self.dtype], lambda axes: None, self.quantization)
        return {
            name: TensorInfo(part.shape, part.dtype.name, int(np.prod(part.shape)) * part.dtype.itemsize)
            for path, leaf in flatten(leaves)
            for name, part in stored_parts(path, leaf).items()
        }

    def read(self, path: str, dtype: Any, wanted: np.ndarray | None = None) -> np.ndarray:
        """The canonical array of one of our paths, in `dtype`, fused from its sources block by block.

        `wanted`: which elements, as `convert.slices.needed` says it; the others are undefined, and are not read where
        they fill a row or column of a source. Memory: the array itself and a few blocks of a source. Raises
        ValueError for a native checkpoint, and if a weight is out of the range of float16.
        """
        if self.reader is None:
            raise ValueError(f"{self.path} is a native checkpoint, whose arrays are read by convert.load")
        parameter = dict(flatten(declare(self.config)))[path]
        out = _aligned_empty(parameter.shape, np.dtype(dtype))
        source = self.sources[path]
        slots = source.transform(out, self.config)
        each = [None] * len(slots) if wanted is None else parts(source, wanted, parameter, self.config)
        for name, slot, part in zip(source.names, slots, each, strict=True):
            damaged: list[bool] = []
            use = functools.partial(_write, name, slot, damaged)
            each_ahead(_blocks(self.reader, name, slot, part), use)
            if any(damaged):
                logger.warning("%s: %s holds NaN; every result that it touches will be NaN", self.path, name)
        return out


def _write(name: str, slot: Slot, damaged: list[bool], rows: tuple[int, np.ndarray]) -> None:
    """A block of a source to its place; appends to `damaged` whether it holds NaN."""
    start, block = rows
    check_range(name, block, slot.view.dtype)
    damaged.append(has_nan(block))
    slot.write(start, block)


def check_range(name: str, block: np.ndarray, dtype: np.dtype) -> None:
    """Raises ValueError if the block holds values that `dtype` does not."""
    if dtype == np.float16 and block.dtype != np.float16 and np.abs(block).max() > 65504:
        raise ValueError(f"{name} has values beyond float16's 65504; use bfloat16 or float32")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder of Hugging Face's, PEFT's, Megatron-LM's or our own, or a .gguf file or a folder with one.

    A Hugging Face folder holds config.json and safetensors, or else pytorch_model.bin, single or sharded.
    An adapter is merged into its base model, which its config names (a path or a Hub id); so are Megatron's ranks.
    Raises FileNotFoundError if there is no such path or no checkpoint in it, and ValueError, naming the field or the
    tensors, for one that is not supported or not complete.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no such checkpoint: {path.absolute()}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise FileNotFoundError(f"{path} is a file but not a .gguf; give the folder that holds config.json")
        return _open_gguf(path)
    if (path / manifest.FILE_NAME).exists():
        native = manifest.Manifest.read(path)
        return Checkpoint(path, "native", native.config, native.dtype, quantization=native.quantization)
    if (path / lora.CONFIG).exists() and not any(_weights(path)):
        base = resolve(lora.base_model(path))
        if not (base / "config.json").exists():
            raise FileNotFoundError(f"{path} is an adapter for {base}, which holds no config.json")
        return _open_hugging_face(base, adapter=path)
    if not any(_weights(path)) and (iteration := megatron.find(path)) is not None:
        reader, config, sources = megatron.read_megatron(iteration)
        _check_dtypes(reader, megatron.IGNORED, path)
        return Checkpoint(path, "megatron", config, main_dtype(reader.tensors, DTYPES), reader, sources)
    if (path / "config.json").exists():
        return _open_hugging_face(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if ggufs:
        raise FileNotFoundError(f"{path} holds {len(ggufs)} .gguf files; give one of them: {ggufs[0]}, …")
    raise FileNotFoundError(f"{path} holds no checkpoint: no config.json, no {manifest.FILE_NAME}, no .gguf file")


def _open_hugging_face(folder: Path, adapter: Path | None = None) -> Checkpoint:
    where = str(folder / "config.json")
    values = _load_object(folder / "config.json")
    generation = folder / "generation_config.json"
    generated = _load_object(generation) if generation.exists() else None
    quantization = values.pop("quantization_config", None) or values.pop("compression_config", None)
    config = model_config(values, generated, where)
    family = family_of(values, where)
    form, reader = _reader(folder)
    reader = dequantized(reader, quantization, where)
    if adapter is not None:
        reader = lora.merged(reader, adapter)
    table = family.rows(config, reader.tensors)
    if family.is_bare(reader.tensors) and not config.tied_head and not _has(reader, table.get("head.weight")):
        logger.info("%s was saved without a head: it embeds text and generates none", folder)
        config = dataclasses.replace(config, headless=True, head_bias=False)
    ignored = family.ignored
    if not config.headless:
        config, table, ignored = _resolve_tied_head(config, table, ignored, reader)
    _check_dtypes(reader, ignored, folder)
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    sources = match(config, table, shapes, ignored, str(folder))
    stored = main_dtype(reader.tensors, DTYPES, values.get("dtype", values.get("torch_dtype")))
    kept = stored_quantization(config, sources, reader)
    if quantization is not None:
        logger.warning("%s: %s", folder, described(kept, config))
    return Checkpoint(folder, form, config, stored, reader, sources, kept, adapter)


def _load_object(path: Path) -> dict[str, Any]:
    values = load_json(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object")
    return values


def _reader(folder: Path) -> tuple[Literal["safetensors", "torch"], Reader]:
    """The folder's weights: safetensors before the pickled copies that often lie beside them."""
    safe, torch = _weights(folder)
    if safe:
        return "safetensors", SafetensorsReader(folder)
    if torch:
        return "torch", TorchReader(folder)
    names = ", no ".join(f"{single}, no {single}.index.json" for single in _SINGLES)
    raise FileNotFoundError(
        f"{folder} has no {names}; weights in other files (.pth, .msgpack, .h5) are not read: save them with "
        "transformers' save_pretrained first"
    )


def _weights(folder: Path) -> list[bool]:
    """For each of _SINGLES whether it, or its index, is there."""
    return [any((folder / f"{single}{suffix}").exists() for suffix in ("", ".index.json")) for single in _SINGLES]


def _check_dtypes(reader: Reader, ignored: tuple[str, ...], folder: Path) -> None:
    """Raises ValueError for weights that are read as something else than floats."""
    skip = re.compile("|".join(ignored) or r"(?!)")
    odd = [
        f"{name} ({info.dtype})"
        for name, info in reader.tensors.items()
        if info.dtype in FILE_DTYPES and info.dtype not in FLOATS and not skip.fullmatch(name)
    ]
    if odd:
        raise ValueError(f"{folder}: tensors of unsupported dtypes: {some(odd)}; supported: {', '.join(FLOATS)}")


def _open_gguf(path: Path) -> Checkpoint:
    from convert.gguf_checkpoint import read_gguf  # the gguf package is optional

    reader, config, sources = read_gguf(path)
    from convert.gguf_reader import DTYPES as GGUF_DTYPES

    return Checkpoint(path, "gguf", config, main_dtype(reader.tensors, GGUF_DTYPES), reader, sources)


def _resolve_tied_head(
    config: ModelConfig, table: Mapping[str, Source], ignored: tuple[str, ...], reader: Reader
) -> tuple[ModelConfig, Mapping[str, Source], tuple[str, ...]]:
    """What a tied config means for the tensors that are there, as transformers 5 does it.

    Embedding alone: nothing to do. Head alone: it is the embedding. Both: tied only if they are equal, which takes
    reading them; else the config is wrong and the head is a weight of its own.
    """
    (embed,), (head,) = table["embed.weight"].names, table["head.weight"].names
    if not config.tied_head or head not in reader.tensors:
        return config, table, ignored
    if embed not in reader.tensors:
        return config, {**table, "embed.weight": Source((head,), table["embed.weight"].transform)}, ignored
    if _equal(reader, embed, head):
        return config, table, (*ignored, head.replace(".", r"\."))
    logger.warning("the config ties the head to the embedding, but %s and %s differ: not tied", embed, head)
    return dataclasses.replace(config, tied_head=False), table, ignored


def _has(reader: Reader, source: Source | None) -> bool:
    return source is not None and any(name in reader.tensors for name in source.names)


def _equal(reader: Reader, first: str, second: str) -> bool:
    infos = reader.tensors[first], reader.tensors[second]
    if infos[0] != infos[1] or not infos[0].shape:
        return False
    step, end = rows_per_block(infos[0]), infos[0].shape[0]
    ranges = [(start, min(start + step, end)) for start in range(0, end, step)]
    return all(np.array_equal(reader.read(first, *rows), reader.read(second, *rows)) for rows in ranges)


def _blocks(reader: Reader, name: str, slot: Slot, part: Part | None) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a source, cut at the slot's groups; part: what is needed of it, None: all."""
    info = reader.tensors[name]
    step = max(1, rows_per_block(info) // slot.group) * slot.group
    for start in range(0, info.shape[0], step):
        rows = start, min(start + step, info.shape[0])
        block = reader.read(name, *rows) if part is None else part.read(reader, name, *rows)
        if block is not None:
            yield start, block


def rows_per_block(info: TensorInfo) -> int:
    """Rows in a block; counted as float32, which is what quantized ones become."""
    return max(1, _BLOCK_BYTES // (4 * max(1, math.prod(info.shape[1:]))))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)
