"""Transforms for source tensors that hold several projections, or whose rows lie in another order than ours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from convert.transforms import Slot, Transform, fused_qkv
from jaxinfer.config import ModelConfig


@dataclass(frozen=True)
class Joined(Slot):
    """One source that holds several, one after another along `axis`: 0, its rows, or 1, its columns."""

    parts: tuple[Slot, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def group(self) -> int:
        return math.lcm(*(part.group for part in self.parts))

    def write(self, start: int, block: np.ndarray) -> None:
        first = 0
        for part in self.parts:
            size = part.shape[self.axis]
            if self.axis:
                part.write(start, block[:, first : first + size])
            else:
                low, high = max(start, first), min(start + len(block), first + size)
                if low < high:
                    part.write(low - first, block[low - start : high - start])
            first += size

    def read(self) -> np.ndarray:
        return np.concatenate([part.read() for part in self.parts], axis=self.axis)


@dataclass(frozen=True)
class Reordered(Slot):
    """A source whose rows lie in another order within each head: our row i is the source's row `order[i]`."""

    order: tuple[int, ...]

    def write(self, start: int, block: np.ndarray) -> None:
        heads = block.reshape(-1, len(self.order), *block.shape[1:])
        super().write(start, heads[:, self.order].reshape(block.shape))

    def read(self) -> np.ndarray:
        ours = super().read()
        heads = ours.reshape(-1, len(self.order), *ours.shape[1:])
        return heads[:, np.argsort(self.order)].reshape(ours.shape)


@dataclass(frozen=True)
class Stacked(Slot):
    """One source of three dimensions that holds those of several experts, each in its own slot."""

    parts: tuple[Slot, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def group(self) -> int:
        return 1

    def write(self, start: int, block: np.ndarray) -> None:
        for part, expert in zip(self.parts[start:], block):
            part.write(0, expert)

    def read(self) -> np.ndarray:
        return np.stack([part.read() for part in self.parts])


def joined(transform: Transform, axis: int = 0) -> Transform:
    """The sources of `transform`, joined to one."""
    return lambda out, config: (Joined(out, 1, transform(out, config), axis),)


def grouped_qkv(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkv [embed, kv_heads, q_per_kv + 2, head_dim] from one [(queries, key, value) of each kv head, embed]."""
    return (Slot(np.moveaxis(out, 0, -1), 3),)


def grouped_qkv_bias(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkv_bias [kv_heads, q_per_kv + 2, head_dim] from one of the same order, flat."""
    return (Slot(out, 3),)


def qkv_by_input(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkv from one [embed, queries and keys and values], as GPT-2 stores it: inputs first."""
    parts = tuple(Slot(np.moveaxis(slot.view, -1, 0), 1) for slot in fused_qkv(out, config))
    return (Joined(out, 1, parts, 1),)


def out_by_input(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """out [kv_heads, q_per_kv, head_dim, embed] from [heads · head_dim, embed], inputs first."""
    return (Slot(out, 3),)


def heads(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """A norm over all heads together: [kv_heads, …, head_dim] from [heads · head_dim]."""
    return (Slot(out, out.ndim),)


def each_head_interleaved(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """A norm's scale for each head, [kv_heads, …, head_dim] from [heads, head_dim], whose dimensions alternate."""
    halves = out.reshape(*out.shape[:-1], 2, out.shape[-1] // 2)
    return (Slot(np.swapaxes(halves, -1, -2), out.ndim - 1),)


def rotary_interleaved(transform: Transform) -> Transform:
    """q and k whose RoPE turns neighbouring dimensions, 2i with 2i + 1, in our order, which turns i with i + half.

    The same order for queries and keys leaves their products as they are, so that one RoPE serves all families.
    """

    def slots(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
        query, key, value = transform(out, config)
        order = interleaved_order(config)
        return (*(Reordered(slot.view, slot.rows, order) for slot in (query, key)), value)

    return slots


def interleaved_order(config: ModelConfig) -> tuple[int, ...]:
    """The source's dimension of each of ours: even ones, odd ones, and those that are not turned."""
    dims = config.head_dim if config.rope is None or config.rope.dims is None else config.rope.dims
    return (*range(0, dims, 2), *range(1, dims, 2), *range(dims, config.head_dim))


def expert_gate_up(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_gate_up [experts, embed, 2, mlp] from the gates [mlp, embed] of all experts, then their ups."""
    return tuple(Slot(expert[:, part].T, 1) for part in range(2) for expert in out)


def expert_down(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_down [experts, mlp, embed] from [embed, mlp] of each."""
    return tuple(Slot(expert.T, 1) for expert in out)


def stacked_gate_up(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_gate_up [experts, embed, 2, mlp] from one [experts, 2 · mlp, embed]."""
    parts = tuple(Joined(expert, 1, (Slot(expert[:, 0].T, 1), Slot(expert[:, 1].T, 1)), 0) for expert in out)
    return (Stacked(out, 1, parts),)


def stacked_down(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_down [experts, mlp, embed] from one [experts, embed, mlp]."""
    return (Stacked(out, 1, expert_down(out, config)),)


def interleaved_gate_up(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_gate_up [experts, embed, 2, mlp] from one [experts, embed, 2 · mlp] whose columns alternate."""
    return (Stacked(out, 1, tuple(Slot(expert.swapaxes(1, 2), 1) for expert in out)),)


def interleaved_gate_up_bias(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_gate_up_bias [experts, 2, mlp] from one [experts, 2 · mlp] whose columns alternate."""
    return (Slot(out.swapaxes(1, 2), 1),)


def experts_by_input(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """[experts, inputs, outputs] as it is."""
    return (Stacked(out, 1, tuple(Slot(expert, 1) for expert in out)),)


def flat_gate_up(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_gate_up [experts, embed, 2, mlp] from gates and ups, [experts · mlp, embed] each."""
    return tuple(Slot(np.moveaxis(out[:, :, part], 1, 2), 2) for part in range(2))


def flat_down(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """expert_down [experts, mlp, embed] from [experts · mlp, embed]."""
    return (Slot(out, 2),)


def each_head(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """A norm's scale for each head, [kv_heads, …, head_dim], from one [head_dim] of each head."""
    return tuple(Slot(head, 1) for head in out.reshape(-1, out.shape[-1]))


def latent_queries(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """q_b [inputs, heads, nope + rope] from [heads · (nope + rope), inputs], RoPE over neighbouring dimensions."""
    return (Reordered(np.moveaxis(out, 0, -1), 2, _last_interleaved(config.qk_nope_dim, config.qk_rope_dim)),)


def latent_keys(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """kv_a [embed, latent + rope] from [latent + rope, embed], RoPE over neighbouring dimensions."""
    return (Reordered(out.T[None], 2, _last_interleaved(config.kv_lora_rank, config.qk_rope_dim)),)


def latent_expansion(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """kv_b [heads, nope + v, latent] from [heads · (nope + v), latent]."""
    return (Slot(out, 2),)


def _last_interleaved(first: int, rope: int) -> tuple[int, ...]:
    return (*range(first), *range(first, first + rope, 2), *range(first + 1, first + rope, 2))
