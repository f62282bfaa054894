"""What a family is, and how its table of tensor names is matched with what a checkpoint holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from convert.families.fields import Fields
from convert.transforms import Transform
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import declare, flatten


@dataclass(frozen=True)
class Source:
    """The source tensors of one of our parameters, and how they fill it.

    In a name `{}` stands for the layer's number, and `{expert}`, `{head}` or `{kv_head}` for each of them: such a name
    stands for them all.
    """

    names: tuple[str, ...]
    transform: Transform

    def of_layer(self, layer: str, config: ModelConfig) -> Source:
        """The source with its full names."""
        counts = {"expert": config.num_experts, "head": config.num_heads, "kv_head": config.num_kv_heads}
        names: list[str] = []
        for name in self.names:
            each = next((each for each in counts if f"{{{each}}}" in name), None)
            numbers = range(1 if each is None else counts[each])
            names += [name.format(layer, **dict.fromkeys(counts, number)) for number in numbers]
        return Source(tuple(names), self.transform)


Table = Mapping[str, Source]
"""Our path, with `{}` for the layer's number → its sources. Rows for what a config does not declare are not used."""


@dataclass(frozen=True)
class Family:
    """One model family of Hugging Face's."""

    config: Callable[[Fields], ModelConfig]
    table: Table | Callable[[ModelConfig], Table]
    """The rows, where they depend on the config a function of it."""
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Regular expressions of tensors that carry nothing the config does not say."""
    prefix: str = "model."
    """What the names in some checkpoints lack: those that were saved without their head."""
    old_endings: Mapping[str, str] = field(default_factory=dict)
    """How names end → how they do in checkpoints of old."""

    def is_bare(self, names: Iterable[str]) -> bool:
        """Whether a checkpoint with tensors `names` was saved without its head."""
        names = list(names)
        return bool(names) and not any(name.startswith(self.prefix) for name in names)

    def rows(self, config: ModelConfig, names: Iterable[str]) -> Table:
        """The table for a config, under the names that a checkpoint with tensors `names` has."""
        table, names = self.table(config) if callable(self.table) else self.table, list(names)
        if self.is_bare(names):
            table = _renamed(table, rf"^{re.escape(self.prefix)}", "")
        for ending, old in self.old_endings.items():
            if any(name.endswith(old) for name in names):
                table = _renamed(table, rf"{re.escape(ending)}$", old)
        return table


def _renamed(table: Table, pattern: str, by: str) -> Table:
    return {
        path: Source(tuple(re.sub(pattern, by, name) for name in row.names), row.transform)
        for path, row in table.items()
    }


def match(
    config: ModelConfig,
    table: Table,
    shapes: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str],
    where: str,
) -> dict[str, Source]:
    """Our path → its sources with their full names, for every parameter of `config`.

    `shapes`: of every tensor in the checkpoint. Raises ValueError naming what is missing, unknown or mis-shaped.
    """
    sources: dict[str, Source] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for path, parameter in flatten(declare(config)):
        number = re.search(r"\d+", path)
        layer = number.group() if number else ""
        row = table[re.sub(r"\d+", "{}", path, count=1)]
        source = row.of_layer(layer, config)
        canonical = np.broadcast_to(np.uint8(0), parameter.shape)  # takes no memory; only its views' shapes are used
        slots = source.transform(canonical, config)
        expected |= {name: slot.shape for name, slot in zip(source.names, slots, strict=True)}
        sources[path] = source
    skip = re.compile("|".join(ignored) or r"(?!)")
    missing = [name for name in expected if name not in shapes]
    unknown = [name for name in shapes if name not in expected and not skip.fullmatch(name)]
    misshaped = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = [
        f"{what} tensors: {some(names)}"
        for what, names in (("missing", missing), ("unknown", unknown), ("mis-shaped", misshaped))
        if names
    ]
    if problems:
        raise ValueError(f"{where} does not hold a {config.family} model as its config says; " + "; ".join(problems))
    return sources


def some(names: list[str], limit: int = 10) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
