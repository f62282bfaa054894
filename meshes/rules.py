"""Logical axis → mesh axis, in one table."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "kv_heads": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "embed": None,
    "head_dim": None,
    "pages": None,
    "page": None,
    "slots": None,
}


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions have these logical axes.

    Raises ValueError for an unknown axis, or for two dimensions on one mesh axis.
    """
    if unknown := [axis for axis in axes if axis is not None and axis not in RULES]:
        raise ValueError(f"unknown logical axes {unknown}; known: {', '.join(RULES)}")
    spec = [None if axis is None else RULES[axis] for axis in axes]
    used = [axis for axis in spec if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {tuple(axes)} put two dimensions on one mesh axis: {tuple(spec)}")
    return PartitionSpec(*spec)


def sharding(mesh: Mesh | AbstractMesh, axes: Sequence[str | None] = ()) -> NamedSharding:
    """The NamedSharding of an array with these logical axes; none at all: replicated."""
    return NamedSharding(mesh, partition_spec(axes))
