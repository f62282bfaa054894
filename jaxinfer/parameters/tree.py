"""Weights by name: nested dicts, and paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Tree = dict[Any, Any]
"""A nested dict; layers are keyed by their number. The tree's keys are the attributes of the modules in `models`."""


def flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf in tree order, a path reading like `layers.3.attention.qkv`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def unflatten(leaves: dict[str, Any]) -> Tree:
    """The nested dict of path → leaf; layer numbers become integers again."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree
