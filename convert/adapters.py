"""LoRA adapters as factors of our projections, for a model that keeps them beside its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from convert import lora
from convert.checkpoint import Checkpoint
from convert.families import family_of
from convert.families.table import Source, some
from convert.low_bit import canonical, fusible
from convert.manifest import CONFIGS, HUGGING_FACE, NAMES
from convert.shards import load_json
from convert.tensors import Stored
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Parameter

_MERGE = "merge the adapter instead: give its own folder as the model"


class Adapter:
    """An adapter's factors, read when they are asked for."""

    def __init__(self, folder: Path):
        """Raises FileNotFoundError if there is no adapter in `folder`, ValueError for what only merging can do."""
        self.folder = folder
        self._changes, replaced = lora.read_adapter(folder)
        if replaced:
            raise ValueError(f"{folder} has whole weights (modules_to_save): {some([*replaced])}; {_MERGE}")
        if turned := [name for name, change in self._changes.items() if change.transposed]:
            raise ValueError(f"{folder} changes embeddings, or inputs-first layers: {some(turned)}; {_MERGE}")

    @property
    def rank(self) -> int:
        """The largest of its factors'."""
        return max((change.a.shape[0] for change in self._changes.values()), default=1)

    @property
    def _described(self) -> str:
        """The folder, and the model that it says it is for: the likeliest reason why it does not fit."""
        return f"{self.folder}, an adapter for {lora.read_config(self.folder).get('base_model_name_or_path')}:"

    def factors(
        self, sources: Mapping[str, tuple[Source, Parameter]], config: ModelConfig, rank: int
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(path, a, b) of every projection: a [n · rank, *inputs], b [n · rank, *outputs] f32, scaled.

        sources: path → as `adaptable` gives it; n of them are fused in a projection, and each has `rank` rows of its
        own, zeros where the adapter does not use them. Raises ValueError if the adapter does not fit.
        """
        self._check({name for source, _ in sources.values() for name in source.names}, rank)
        for path, (source, parameter) in sources.items():
            yield path, *self._fused(source, parameter, config, rank)

    def _check(self, names: set[str], rank: int) -> None:
        if strangers := [name for name in self._changes if name not in names]:
            raise ValueError(
                f"{self._described} changes {some(strangers)}, which this model does not have or keeps no adapters for "
                f"(only the projections of attention and of plain MLPs); if that is this model, {_MERGE}"
            )
        if self.rank > rank:
            raise ValueError(f"{self.folder} has rank {self.rank}, and max_lora_rank is {rank}; raise that")

    def _fused(
        self, source: Source, parameter: Parameter, config: ModelConfig, rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        inputs, outputs = parameter.shape[: parameter.contract], parameter.shape[parameter.contract :]
        rows = rank * len(source.names)
        a, b = np.zeros((rows, parameter.inputs), np.float32), np.zeros((*outputs, rows), np.float32)
        slots = source.transform(canonical(b, parameter), config)
        for start, name, slot in zip(range(0, rows, rank), source.names, slots, strict=True):
            change = self._changes.get(name)
            if change is None:
                continue
            if change.shape != (slot.shape[0], parameter.inputs):
                wanted = [slot.shape[0], parameter.inputs]
                raise ValueError(f"{self._described} {name} is {list(change.shape)}; the model's is {wanted}")
            here = slice(start, start + change.a.shape[0])
            block = np.zeros((slot.shape[0], rows), np.float32)
            a[here], block[:, here] = _whole(change.a), np.float32(change.scaling) * _whole(change.b)
            slot.write(0, block)
        return a.reshape(rows, *inputs), np.moveaxis(b, -1, 0)


def _whole(stored: Stored) -> np.ndarray:
    return stored.read(0, stored.shape[0]).astype(np.float32)


def adaptable(checkpoint: Checkpoint, parameters: Mapping[str, Parameter]) -> dict[str, tuple[Source, Parameter]]:
    """Those of the projections whose inputs are in the order in which an adapter has them, and what they are made of.

    Raises ValueError for a checkpoint that does not say what Hugging Face calls its weights.
    """
    sources = _sources(checkpoint)
    return {
        path: (sources[path], parameter)
        for path, parameter in parameters.items()
        if fusible(parameter, sources[path].transform, None, checkpoint.config)
    }


def _sources(checkpoint: Checkpoint) -> Mapping[str, Source]:
    if checkpoint.format in ("safetensors", "torch"):
        return checkpoint.sources
    folder = checkpoint.path / HUGGING_FACE
    if checkpoint.format != "native" or not (folder / NAMES).is_file():
        raise ValueError(
            f"{checkpoint.path} does not hold Hugging Face's names of its weights, by which adapters name them; load "
            "the Hugging Face checkpoint, or what python -m convert made of that"
        )
    values = load_json((folder / CONFIGS[0]).read_bytes(), str(folder))
    names = load_json((folder / NAMES).read_bytes(), str(folder))
    table = family_of(values, str(folder)).rows(checkpoint.config, ())
    return {path: Source(tuple(own), table[_row(path)].transform) for path, own in names.items()}


def _row(path: str) -> str:
    """The path's key in a family's table."""
    return ".".join("{}" if part.isdigit() else part for part in path.split("."))
