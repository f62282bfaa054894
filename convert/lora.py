"""LoRA adapters, as PEFT saves them, merged into the weights as these are read.

A module X of the base has X.lora_A.weight [rank, inputs] and X.lora_B.weight [outputs, rank] in the adapter's file:
X.weight + scaling · (B · A) takes the place of X.weight. scaling = alpha / rank, or alpha / √rank (`use_rslora`). An
embedding has lora_embedding_A [rank, rows] and lora_embedding_B [columns, rank], whose product is transposed, as it is
where the base stores [inputs, outputs] (`fan_in_fan_out`).
Hu et al. 2021; rslora: Kalajdzievski 2023.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert import safetensors_reader, torch_reader
from convert.families.fields import Fields
from convert.families.table import some
from convert.shards import load_json
from convert.slices import Part
from convert.tensors import FLOATS, Reader, Stored

CONFIG = "adapter_config.json"
_FILES: dict[str, Callable[[Path], dict[str, Stored]]] = {
    "adapter_model.safetensors": safetensors_reader.read_headers,
    "adapter_model.bin": torch_reader.read_headers,
}
_PREFIX = "base_model.model."
_PAIRS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
_NO_EFFECT = """
    auto_mapping base_model_name_or_path eva_config exclude_modules inference_mode layers_pattern layers_to_transform
    lora_dropout megatron_core modules_to_save peft_version qalora_group_size revision runtime_config target_modules
    task_type
"""
"""Fields that say how the adapter was made and trained, or what the names and shapes of its tensors say as well."""
_INITIALISERS = (True, False, "gaussian", "orthogonal", "eva", "true", "false")
"""Those that leave the base as it is; the others (pissa, olora, corda, loftq) change it, and what to is not stored."""


@dataclass(frozen=True)
class Change:
    """What is added to one weight: its two factors, as they are stored."""

    a: Stored
    """[rank, inputs]."""
    b: Stored
    """[outputs, rank]."""
    scaling: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.b.shape[0], self.a.shape[1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """[stop - start, columns] float32."""
        a, b = (stored.read(0, stored.shape[0]).astype(np.float32) for stored in (self.a, self.b))
        left, right = (a.T, b.T) if self.transposed else (b, a)
        return np.float32(self.scaling) * (left[start:stop] @ right)


class MergingReader:
    """The tensors of `reader`, some of them replaced, some changed."""

    def __init__(self, reader: Reader, replaced: Mapping[str, Stored], changes: Mapping[str, Change]):
        self._reader, self._replaced, self._changes = reader, replaced, changes
        self.tensors = dict(reader.tensors) | {name: stored.info for name, stored in replaced.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop): float32 where the adapter adds to them."""
        source = self._replaced.get(name)
        rows = self._reader.read(name, start, stop) if source is None else source.read(start, stop)
        return self._changed(name, rows, start, stop)

    def read_part(self, name: str, part: Part, start: int, stop: int) -> np.ndarray | None:
        """The same rows, of which only what `part` needs is right; None if it needs none of them."""
        source = self._replaced.get(name)
        rows = part.read(self._reader, name, start, stop) if source is None else source.read(start, stop)
        return None if rows is None else self._changed(name, rows, start, stop)

    def _changed(self, name: str, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        change = self._changes.get(name)
        return rows if change is None else rows.astype(np.float32) + change.rows(start, stop)


def merged(reader: Reader, folder: Path) -> Reader:
    """The reader with the adapter in `folder` merged into it.

    Raises FileNotFoundError if there is no adapter, ValueError for settings that are not handled and for tensors that
    do not fit the base.
    """
    changes, replaced = read_adapter(folder)
    added = {name: tensor.shape for name, tensor in (replaced | changes).items()}
    held = {name: info.shape for name, info in reader.tensors.items()}
    # A tied base has no head to replace. If none of its names is a head's, opening it refuses the new one.
    ends = tuple(f"{module}.weight" for module in _saved(read_config(folder)))
    new = {name for name in replaced.keys() - held.keys() if name.endswith(ends)}
    odd = {name: shape for name, shape in added.items() if held.get(name) != shape and name not in new}
    strangers = [f"{name} {list(shape)}" for name, shape in odd.items()]
    if strangers:
        raise ValueError(f"{folder} does not fit its base model, which has no such weights: {some(strangers)}")
    return MergingReader(reader, replaced, changes)


def read_adapter(folder: Path) -> tuple[dict[str, Change], dict[str, Stored]]:
    """Name of a weight → what is added to it, and → what takes its place.

    Raises FileNotFoundError if there is no adapter, ValueError for settings that are not handled.
    """
    scaling, transposed = _settings(read_config(folder))
    stored = _tensors(folder)
    changes = {
        f"{module}.weight": Change(a, b, scaling(module, a.shape[0]), transposed or embedding)
        for module, a, b, embedding in _pairs(stored, folder)
    }
    replaced = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in stored.items()
        if not name.endswith((*_PAIRS, *_PAIRS.values()))
    }
    return changes, replaced


def base_model(folder: Path) -> str:
    """The path or Hub id of the model that the adapter in `folder` is for. Raises ValueError if it does not say."""
    fields = read_config(folder)
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ValueError(f"{fields.where}: 'base_model_name_or_path' must name the model that the adapter is for")
    return base


def read_config(folder: Path) -> Fields:
    """The adapter's config, without what is off.

    Raises FileNotFoundError if there is none, ValueError if it is no object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no adapter: there is no {CONFIG}")
    values = load_json(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object")
    return Fields({name: value for name, value in values.items() if value}, str(path))


def _settings(fields: Fields) -> tuple[Callable[[str, int], float], bool]:
    """(module, rank) → its scaling, and whether the base stores [inputs, outputs]."""
    fields.expect("peft_type", "LORA")
    fields.expect("bias", "none")
    fields.expect("init_lora_weights", *_INITIALISERS)
    alpha, root = fields.number("lora_alpha"), fields.boolean("use_rslora", False)
    alpha_of, rank_of = _by_module(fields, "alpha_pattern"), _by_module(fields, "rank_pattern")
    default = fields.integer("r") if "r" in fields else None
    transposed = fields.boolean("fan_in_fan_out", False)
    fields.ignore(_NO_EFFECT.split())
    fields.finish()

    def scaling(module: str, rank: int) -> float:
        if (said := rank_of(module, default)) not in (None, rank):
            raise ValueError(f"{fields.where}: the rank of {module} is {said}, but its factors have {rank}")
        return (alpha_of(module, None) or alpha) / (math.sqrt(rank) if root else rank)

    return scaling, transposed


def _saved(fields: Fields) -> list[str]:
    """Names of the modules that are saved whole."""
    names = fields.get("modules_to_save") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{fields.where}: 'modules_to_save' is {names!r}; it must be a list of names")
    return names


def _by_module(fields: Fields, name: str) -> Callable[[str, Any], Any]:
    """(module, default) → what the first pattern that matches says. Raises ValueError for what is no such table."""
    table = fields.get(name) or {}
    numbers = isinstance(table, dict) and all(type(value) in (int, float) and value > 0 for value in table.values())
    try:
        patterns = {re.compile(rf"(.*\.)?({pattern})"): value for pattern, value in table.items()} if numbers else None
    except re.error:
        patterns = None
    if patterns is None:
        raise ValueError(f"{fields.where}: {name!r} is {table!r:.100}; it must map patterns of names to numbers")
    return lambda module, default: next((v for p, v in patterns.items() if p.fullmatch(module)), default)


def _tensors(folder: Path) -> dict[str, Stored]:
    """Those of the adapter, by what they are called in the base."""
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise FileNotFoundError(f"{folder} holds no adapter: there is no {' and no '.join(_FILES)}")
    stored = _FILES[name](folder / name)
    odd = [n for n, tensor in stored.items() if not n.startswith(_PREFIX) or tensor.dtype not in FLOATS]
    if odd:
        raise ValueError(f"{folder / name}: not weights of an adapter: {some(odd)}")
    return {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}


def _pairs(stored: Mapping[str, Stored], folder: Path) -> Iterator[tuple[str, Stored, Stored, bool]]:
    """(module, A, B, whether it is an embedding). Raises ValueError if one is missing, or they do not fit."""
    for end_a, end_b in _PAIRS.items():
        for module in sorted({n.removesuffix(end) for n in stored for end in (end_a, end_b) if n.endswith(end)}):
            a, b = stored.get(module + end_a), stored.get(module + end_b)
            if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
                shapes = " and ".join("nothing" if half is None else str(list(half.shape)) for half in (a, b))
                raise ValueError(f"{folder}: the factors of {module} do not fit each other: {shapes}")
            yield module, a, b, "embedding" in end_a
