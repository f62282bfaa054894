"""How source tensors fill a canonical array: each source is a view of it, made of slices, transposes and axis splits.

Copying rows of a source into its view casts, fuses and transposes in one pass, a block of rows at a time.
Sources keep PyTorch's `[out, in]` order; canonical shapes are those of `jaxinfer.parameters.declare`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxinfer.config import ModelConfig

_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Slot:
    """Where one source tensor goes: a view of the canonical array whose first `rows` axes are the source's first."""

    view: np.ndarray
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the source: the view's leading axes merged, and its trailing ones."""
        leading, trailing = self.view.shape[: self.rows], self.view.shape[self.rows :]
        return (math.prod(leading), *([math.prod(trailing)] if trailing else []))

    @property
    def group(self) -> int:
        """Source rows in one step along the view's first axis."""
        return math.prod(self.view.shape[1 : self.rows])

    def write(self, start: int, block: np.ndarray) -> None:
        """Copy source rows from `start` on; both ends are multiples of `group`. Casts to the view's dtype."""
        target = self.view[start // self.group : (start + len(block)) // self.group]
        block = block.astype(target.dtype, copy=False).reshape(target.shape)
        # As integers: numpy moves dtypes that are not its own one by one, and lets no other thread run meanwhile.
        bits = np.dtype(f"u{target.itemsize}")
        target, block = target.view(bits), block.view(bits)
        axis = self.rows - 1
        # A few rows at a time: a transpose of all of them misses the cache at every element (3 times slower).
        in_order = target.strides[axis] == block.strides[axis] == target.itemsize
        step = target.shape[axis] if in_order else _ROWS_AT_ONCE
        for index in np.ndindex(target.shape[:axis]):
            for row in range(0, target.shape[axis], step):
                rows = (*index, slice(row, row + step))
                target[rows] = block[rows]

    def read(self) -> np.ndarray:
        """The source as it was before it was written here, in the view's dtype."""
        return self.view.reshape(self.shape)


Transform = Callable[[np.ndarray, ModelConfig], tuple[Slot, ...]]
"""(canonical array, config) → the slots of its sources, in the order of their names."""


def whole(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """The source as it is."""
    return (Slot(out, 1),)


def transposed(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """[in, out] from [out, in]."""
    return (Slot(out.T, 1),)


def fused_qkv(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkv [embed, kv_heads, q_per_kv + 2, head_dim] from q, k, v [heads · head_dim, embed]."""
    return tuple(Slot(np.moveaxis(slot.view, 0, -1), slot.rows - 1) for slot in _split_qkv(out, config, lead=1))


def fused_qkv_bias(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkv_bias [kv_heads, q_per_kv + 2, head_dim] from three [heads · head_dim]."""
    return _split_qkv(out, config, lead=0)


def attention_out(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """out [kv_heads, q_per_kv, head_dim, embed] from [embed, heads · head_dim]."""
    return (Slot(np.moveaxis(out, -1, 0), 1),)


def fused_gate_up(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """gate_up [embed, 2, mlp] from gate, up [mlp, embed]."""
    return (Slot(out[:, 0].T, 1), Slot(out[:, 1].T, 1))


def fused_gate_up_bias(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """gate_up_bias [2, mlp] from two [mlp]."""
    return (Slot(out[0], 1), Slot(out[1], 1))


def interleaved_qk(transform: Transform) -> Transform:
    """q and k whose rows alternate between the halves of head_dim, as llama.cpp stores them for its own RoPE."""

    def slots(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
        query, key, value = transform(out, config)
        return (_interleave(query), _interleave(key), value)

    return slots


def _split_qkv(out: np.ndarray, config: ModelConfig, lead: int) -> tuple[Slot, Slot, Slot]:
    """Slots over the kv_heads, q_per_kv + 2, head_dim axes, after `lead` others that stay in front."""
    queries = config.q_per_kv
    return (
        Slot(out[..., :queries, :], lead + 3),
        Slot(out[..., queries, :], lead + 2),
        Slot(out[..., queries + 1, :], lead + 2),
    )


def _interleave(slot: Slot) -> Slot:
    """The last of the row axes, head_dim, split into [2, half] and turned to [half, 2]; splitting keeps it a view."""
    axis, shape = slot.rows - 1, slot.view.shape
    split = slot.view.reshape(*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :])
    return Slot(np.swapaxes(split, axis, axis + 1), slot.rows + 1)
