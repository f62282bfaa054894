"""The tiles a block works through, in the same order in each of its warpgroups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_prefill.plan import FIELDS
from pallas_kernels.paged_prefill.shapes import Shapes

UNLIMITED = 1 << 30
"""A window longer than any sequence."""


class Tile(NamedTuple):
    """Scalars i32."""

    sequence: jax.Array
    row: jax.Array
    """Of the batch, its first."""
    position: jax.Array
    """Of that row in the sequence."""
    tokens: jax.Array
    length: jax.Array
    """Tokens in the sequence's cache."""
    head: jax.Array
    """First of its query heads."""

    @property
    def end(self) -> jax.Array:
        """Position past its last row."""
        return self.position + self.tokens

    def first_key(self, window: int | None) -> jax.Array:
        """The first its rows see."""
        return jnp.maximum(self.position - ((window or UNLIMITED) - 1), 0)

    def seen(self, shapes: Shapes) -> jax.Array:
        """Keys that its last row sees, where no window hides the first."""
        return self.end if shapes.causal else self.length

    def steps(self, shapes: Shapes) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Steps first <= a <= b <= end over the keys; in those from a to b every row sees every key."""
        keys, window = shapes.config.keys, shapes.window
        first, end = lax.div(self.first_key(window), keys), lax.div(self.seen(shapes) + (keys - 1), keys)
        full = lax.div(jnp.maximum(self.position + 1, 0) if shapes.causal else self.length, keys)
        if window is None:
            return first, first, full, end
        seen_by_all = lax.div(jnp.maximum(self.end - window, 0) + (keys - 1), keys)
        a = jnp.minimum(jnp.maximum(seen_by_all, first), end)
        return first, a, jnp.minimum(jnp.maximum(full, a), end), end


def for_each_tile(shapes: Shapes, tiles: Any, count: Any, body: Callable[[Tile, Any], Any], carry: Any) -> Any:
    """Fold `body` over this block's tiles.

    Tiles fall in length. Blocks take turns to and fro: the block that got the longest of one round gets the shortest of
    the next, so all are done at about the same time.
    """
    block, blocks = lax.axis_index("block"), shapes.blocks
    total = count[0] * shapes.head_groups
    rounds, rest = lax.div(total, blocks), lax.rem(total, blocks)

    def place(turn: jax.Array) -> jax.Array:
        return jnp.where(lax.rem(turn, 2) == 0, block, blocks - 1 - block)

    def read(turn: jax.Array) -> Tile:
        at = jnp.minimum(turn * blocks + place(turn), total - 1)
        number, group = lax.div(at, shapes.head_groups), lax.rem(at, shapes.head_groups)
        fields = [tiles[number, field] for field in range(FIELDS)]
        return Tile._make([*fields, group * shapes.config.heads])

    def step(turn: jax.Array, state: tuple[Tile, Any]) -> tuple[Tile, Any]:
        tile, carry = state
        following = read(turn + 1)  # long before it is needed
        return following, body(tile, carry)

    mine = rounds + (place(rounds) < rest).astype(jnp.int32)
    return lax.fori_loop(0, mine, step, (read(jnp.int32(0)), carry))[1]
