"""Opening a checkpoint: its format, config and tensor headers. Nothing here imports jax or reads a weight."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from convert import manifest
from convert.families import family_of, model_config
from convert.families.table import Source, match
from convert.safetensors_reader import DTYPES, SafetensorsReader
from convert.tensors import Reader, TensorInfo, main_dtype
from convert.transforms import Slot
from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import abstract, declare, flatten, stored_parts

logger = logging.getLogger(__name__)

NUMPY_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_BLOCK_BYTES = 16 << 20  # read at a time: small beside a fused tensor, large beside the cost of opening a file
_ALIGNMENT = 64  # XLA on CPU takes a host array as it is, without a copy, if it is aligned so


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; weights are read when asked for, one parameter at a time."""

    path: Path
    format: Literal["safetensors", "gguf", "native"]
    config: ModelConfig
    """Canonical: unpadded, unreplicated."""
    dtype: str
    """The dtype most of it is stored in; float32 if that is a quantized one."""
    reader: Reader | None = field(default=None, repr=False, compare=False)
    """Source tensors under their own names; None for a native checkpoint, which Orbax reads."""
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)
    """Our path → the source tensors that fill it."""
    quantization: Quantization | None = None
    """Of a native checkpoint's projections; None: none. A quantized GGUF's weights are read as floats."""

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

    def read(self, path: str, dtype: Any) -> np.ndarray:
        """The canonical array of one of our paths, in `dtype`, fused from its sources block by block.

        Memory: the array itself and one block of a source. Raises ValueError for a native checkpoint, and if a
        weight is out of the range of float16.
        """
        if self.reader is None:
            raise ValueError(f"{self.path} is a native checkpoint, whose arrays are read by convert.load")
        shape = dict(flatten(declare(self.config)))[path].shape
        out = _aligned_empty(shape, np.dtype(dtype))
        source = self.sources[path]
        for name, slot in zip(source.names, source.transform(out, self.config), strict=True):
            for start, block in _blocks(self.reader, name, slot):
                if out.dtype == np.float16 and block.dtype != np.float16 and np.abs(block).max() > 65504:
                    raise ValueError(f"{name} has values beyond float16's 65504; use bfloat16 or float32")
                slot.write(start, block)
        return out


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder with config.json and safetensors, a .gguf file or a folder with one, or a native folder.

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
    if (path / "config.json").exists():
        return _open_safetensors(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if ggufs:
        raise FileNotFoundError(f"{path} holds {len(ggufs)} .gguf files; give one of them: {ggufs[0]}, …")
    raise FileNotFoundError(f"{path} holds no checkpoint: no config.json, no {manifest.FILE_NAME}, no .gguf file")


def _open_safetensors(folder: Path) -> Checkpoint:
    values = json.loads((folder / "config.json").read_text())
    generation = folder / "generation_config.json"
    where = str(folder / "config.json")
    config = model_config(values, json.loads(generation.read_text()) if generation.exists() else None, where)
    family = family_of(values, where)
    reader = SafetensorsReader(folder)
    config, table, ignored = _resolve_tied_head(config, family.table, family.ignored, reader)
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    sources = match(config, table, shapes, ignored, str(folder))
    return Checkpoint(folder, "safetensors", config, main_dtype(reader.tensors, DTYPES), reader, sources)


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


def _equal(reader: Reader, first: str, second: str) -> bool:
    infos = reader.tensors[first], reader.tensors[second]
    if infos[0] != infos[1]:
        return False
    step, end = _rows_per_block(infos[0]), infos[0].shape[0]
    ranges = [(start, min(start + step, end)) for start in range(0, end, step)]
    return all(np.array_equal(reader.read(first, *rows), reader.read(second, *rows)) for rows in ranges)


def _blocks(reader: Reader, name: str, slot: Slot) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of a source, cut at the slot's groups."""
    info = reader.tensors[name]
    step = max(1, _rows_per_block(info) // slot.group) * slot.group
    for start in range(0, info.shape[0], step):
        yield start, reader.read(name, start, min(start + step, info.shape[0]))


def _rows_per_block(info: TensorInfo) -> int:
    """Rows in a block; counted as float32, which is what quantized ones become."""
    return max(1, _BLOCK_BYTES // (4 * int(np.prod(info.shape[1:]))))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)
