"""Which expert computes which rows: each expert's tokens are laid out in whole tiles, and only these are computed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 256
"""Choices of which every two are compared."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["slots", "sources", "tile_experts", "live"], meta_fields=["tile"]
)
@dataclass(frozen=True)
class Plan:
    """Rows grouped by expert, in the order of their tokens; an expert without tokens has none.

    There are as many tiles as the worst distribution needs; `live` of them, the first, hold tokens.
    """

    slots: jax.Array
    """[choices] i32: the row of each choice; `rows` for one of no expert."""
    sources: jax.Array
    """[rows] i32: the choice of each row; that of a row nobody fills is 0."""
    tile_experts: jax.Array
    """[tiles] i32; 0 for the tiles that are not live."""
    live: jax.Array
    """[1] i32."""
    tile: int
    """Rows of a tile."""

    @property
    def tiles(self) -> int:
        return self.tile_experts.shape[0]

    @property
    def rows(self) -> int:
        return self.sources.shape[0]


def most_tiles(choices: int, num_experts: int, tile: int) -> int:
    """How many tiles the worst distribution needs: every expert that has choices leaves all but one row empty."""
    return max(1, (choices + min(num_experts, choices) * (tile - 1)) // tile)


def plan(experts: jax.Array, num_experts: int, tile: int) -> Plan:
    """experts: [choices] i32, the expert of each; anything outside 0..num_experts - 1 is none."""
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    return _lay_out(experts, *_ranks(experts, num_experts), tile)


def plan_sorted(group_sizes: jax.Array, rows: int, tile: int) -> Plan:
    """For `rows` rows that lie sorted by expert already; those past the last group have none."""
    row, ends = jnp.arange(rows), jnp.cumsum(group_sizes)
    experts = jnp.sum(row[:, None] >= ends, axis=1, dtype=jnp.int32)
    starts = jnp.append(ends - group_sizes, 0)
    return _lay_out(experts, row - starts[experts], group_sizes.astype(jnp.int32), tile)


def _ranks(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier choices have the same expert: [choices] i32; and how many each has in all: [experts] i32.

    Without sorting, which takes a GPU a dozen kernels: choices are compared within chunks, and chunks are counted.
    """
    choices = experts.shape[0]
    chunk = min(CHUNK, choices)
    chunks = jnp.pad(experts, (0, -choices % chunk), constant_values=num_experts).reshape(-1, chunk)
    earlier = jnp.arange(chunk)[:, None] > jnp.arange(chunk)
    within = jnp.sum((chunks[:, :, None] == chunks[:, None, :]) & earlier, axis=2, dtype=jnp.int32)
    counts = jnp.sum(chunks[:, None, :] == jnp.arange(num_experts)[:, None], axis=2, dtype=jnp.int32)
    before = jnp.cumsum(counts, axis=0) - counts
    ranks = within + jnp.take_along_axis(before, jnp.minimum(chunks, num_experts - 1), axis=1)
    return ranks.reshape(-1)[:choices], jnp.sum(counts, axis=0, dtype=jnp.int32)


def _lay_out(experts: jax.Array, ranks: jax.Array, counts: jax.Array, tile: int) -> Plan:
    """experts: [choices], number of experts for none; ranks: [choices], within the expert; counts: [experts]."""
    num_experts, choices = counts.shape[0], experts.shape[0]
    tiles = most_tiles(choices, num_experts, tile)
    ends = jnp.cumsum((counts + tile - 1) // tile)
    starts = jnp.append(0, ends)
    slots = jnp.where(experts < num_experts, starts[experts] * tile + ranks, tiles * tile).astype(jnp.int32)
    sources = jnp.zeros(tiles * tile, jnp.int32)
    sources = sources.at[slots].set(jnp.arange(choices, dtype=jnp.int32), mode="drop", unique_indices=False)
    index = jnp.arange(tiles)
    tile_experts = jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32)
    tile_experts = jnp.where(index < ends[-1], tile_experts, 0)
    return Plan(slots, sources, tile_experts, ends[-1:].astype(jnp.int32), tile)


def in_order(rows: jax.Array, plan: Plan, dtype: Any) -> jax.Array:
    """[choices, width] in `dtype`, zero for a choice of no expert. rows: [splits, rows, width], partial sums."""
    valid = plan.slots < plan.rows
    slots = jnp.where(valid, plan.slots, 0)
    return jnp.where(valid[:, None], sum(part[slots] for part in rows), 0.0).astype(dtype)


def weighted_sum(
    rows: jax.Array, plan: Plan, experts: jax.Array, weights: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Back to the order of the tokens: [tokens, width] f32, the sum over a token's experts of weight x (row + bias).

    rows: [splits, rows, width], partial sums; experts, weights: [tokens, top_k]; bias: [experts, width] or None.
    A choice of no expert adds nothing, whatever its weight.
    """
    tokens, top_k = experts.shape
    slots = plan.slots.reshape(tokens, top_k)
    total = jnp.zeros((tokens, rows.shape[-1]), jnp.float32)
    for k in range(top_k):
        valid = slots[:, k] < plan.rows
        slot = jnp.where(valid, slots[:, k], 0)
        picked = sum(part[slot].astype(jnp.float32) for part in rows)
        if bias is not None:
            picked = picked + bias[jnp.where(valid, experts[:, k], 0)].astype(jnp.float32)
        total = total + jnp.where(valid[:, None], picked * weights[:, k, None].astype(jnp.float32), 0.0)
    return total
