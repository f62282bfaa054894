"""Transforms for the layers that keep a state, and for attention with output gates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from convert.joined import Joined
from convert.transforms import Slot
from jaxinfer.config import ModelConfig


@dataclass(frozen=True)
class Convolution(Joined):
    """Kernels of a convolution channel by channel, as PyTorch keeps them: [channels, 1, width]."""

    @property
    def shape(self) -> tuple[int, ...]:
        channels, width = super().shape
        return (channels, 1, width)

    @property
    def group(self) -> int:
        """All channels at once: they are few, and their parts do not end on common rows."""
        return self.shape[0]

    def read(self) -> np.ndarray:
        return super().read()[:, None]


def by_head(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """[embed, heads, …] from [heads · …, embed]."""
    return (Slot(np.moveaxis(out, 0, -1), out.ndim - 1),)


def each_value_head(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """[key_heads, shared] from [value heads]."""
    return (Slot(out, 2),)


def convolution(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """conv [key_heads, channels, width] from one [queries of all heads, then keys, then values, 1, width]."""
    keys = config.recurrent_key_dim
    parts = np.split(out, [keys, 2 * keys], axis=1)
    return (Convolution(out, 1, tuple(Slot(part, 2) for part in parts), 0),)


def gated_qkv(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkv [embed, kv_heads, queries, key, value, gates, head_dim] from q, k and v [heads · head_dim, embed], where q
    has the query and the gate of a head side by side.
    """
    queries, (embed, heads, _, head_dim) = config.q_per_kv, out.shape
    inputs, head, row, dim = out.strides
    pairs = np.lib.stride_tricks.as_strided(  # a gate stands so many rows behind its query
        out, (embed, heads, queries, 2, head_dim), (inputs, head, row, (queries + 2) * row, dim)
    )
    views = ((pairs, 4), (out[:, :, queries], 2), (out[:, :, queries + 1], 2))
    return tuple(Slot(np.moveaxis(view, 0, -1), rows) for view, rows in views)


def gated_heads(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkvz [embed, heads, query + key + value + gate] from two: [heads · (query, key, value), embed] and the gates."""
    views = np.split(np.moveaxis(out, 0, -1), [config.recurrent_channels], axis=1)
    return tuple(Slot(view, 2) for view in views)


def all_heads(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """A norm's scale, [heads, …, value_dim] from [heads · value_dim]."""
    return (Slot(out, out.ndim),)
