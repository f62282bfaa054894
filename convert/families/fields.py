"""A config read field by field, so that one which nobody understood is an error and not a silent wrong answer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any


class Fields:
    """The fields of one config section; `finish` raises if one was neither read nor ignored.

    `where` names the section in messages, e.g. `config.json`.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.where = where
        self._values = values
        self._unread = set(values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The value as written (null is None), or the default where the field is absent."""
        self._unread.discard(name)
        return self._values.get(name, default)

    def with_default(self, name: str, value: Any, unless: str) -> Fields:
        """These fields, `name` being `value` if neither it nor `unless` is there or is null."""
        if self._values.get(name) is None and self._values.get(unless) is None:
            self.replace(name, value)
        return self

    def replace(self, name: str, value: Any) -> None:
        """From here on `name` is `value`, still to be read."""
        self._values = {**self._values, name: value}
        self._unread.add(name)

    def section(self, name: str) -> Fields:
        """The fields of a nested config, none if it is null or absent; read and `finish` it."""
        return Fields(self.mapping(name), f"{self.where}, {name}")

    def mapping(self, name: str) -> dict[str, Any]:
        """A copy of a nested config, empty if it is null or absent. Raises ValueError for anything else."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: '{name}' is {value!r}; it must be an object, or null")
        return dict(value or {})

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises ValueError for anything else, or if absent without a default."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: '{name}' is {value!r}; it must be a positive integer")
        return value

    def group_size(self, *names: str) -> int | None:
        """Inputs that share a scale, by any of these names; -1: all of them; None: it is not said."""
        size = self.agreed(*names)
        if size is not None and (type(size) is not int or (size < 1 and size != -1)):
            raise ValueError(f"{self.where}: {names[0]!r} is {size!r}; it must be a positive integer, or -1")
        return size

    def agreed(self, *names: str, default: Any = None) -> Any:
        """What fields of these names say, those that are absent or null left out; `default` if all are. Raises
        ValueError if they contradict each other.
        """
        said = {name: value for name in names if (value := self.get(name)) is not None}
        values = list(said.values())
        if any(value != values[0] for value in values):
            raise ValueError(f"{self.where}: {' and '.join(map(repr, said))} contradict each other: {values}")
        return values[0] if values else default

    def count(self, name: str, default: int) -> int:
        """An integer that may be zero. Raises ValueError for anything else."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{self.where}: '{name}' is {value!r}; it must be a positive integer or zero")
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, None if it is null or absent. Raises ValueError for anything else."""
        value = self.get(name)
        listed = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        if value is not None and not listed:
            raise ValueError(f"{self.where}: '{name}' is {value!r}; it must be a list of integers, or null")
        return value

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with an entry for each layer, None if it is null or absent. Raises ValueError for anything else."""
        value = self.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != num_layers):
            said = f"has {len(value)} entries for {num_layers} layers" if isinstance(value, list) else f"is {value!r}"
            raise ValueError(f"{self.where}: '{name}' {said}; it must be a list with one for each layer, or null")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number. Raises ValueError for anything else, or if absent without a default."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{self.where}: '{name}' is {value!r}; it must be a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false. Raises ValueError for anything else."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: '{name}' is {value!r}; it must be true or false")
        return value

    def choice(self, name: str, value: Any, choices: Mapping[Any, Any]) -> Any:
        """`choices[value]`. Raises ValueError naming the supported values."""
        if not isinstance(value, Hashable) or value not in choices:
            raise ValueError(
                f"{self.where}: '{name}' is {value!r}, which is not supported; supported: {_join(map(str, choices))}"
            )
        return choices[value]

    def expect(self, name: str, *allowed: Any) -> None:
        """Accept a field only where it has no effect. Raises ValueError if present with another value."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:100]}…"
            raise ValueError(f"{self.where}: '{name}' is {shown}; only {_join(map(repr, allowed))} is supported")

    def ignore(self, names: Iterable[str]) -> None:
        """Skip fields that cannot change what the model computes."""
        self._unread -= set(names)

    def finish(self) -> None:
        """Raise ValueError naming the fields that were not understood."""
        if self._unread:
            listed = ", ".join(f"'{name}'" for name in sorted(self._unread))
            raise ValueError(
                f"{self.where}: fields not understood: {listed}. They may change what the model computes; "
                "remove them if you know that they do not"
            )


def token_ids(fields: Fields, name: str, default: int | None = None) -> tuple[int, ...]:
    """A field that holds a token id, a list of them, or null."""
    value = fields.get(name, default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{fields.where}: '{name}' is {value!r}; it must be a token id, a list of them, or null")
    return tuple(i for i in ids if i >= 0)


def _join(names: Iterable[str]) -> str:
    return ", ".join(names)
