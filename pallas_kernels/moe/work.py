"""How the tiles of a grouped matmul are handed to blocks: every block of the grid walks the same list with a stride."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def locate(unit: jax.Array, live: jax.Array, columns: int, band: int) -> tuple[jax.Array, jax.Array]:
    """The (row tile, column tile) of a unit of work.

    Row tiles come in bands; within a band, its row tiles run fastest, so that blocks which work at the same time share
    the weights' columns, and the rows of a band are still in the L2 cache for the next columns.
    """
    first = unit // (band * columns)
    height = jnp.minimum(band, live - first * band)
    rest = unit - first * (band * columns)
    column = lax.div(rest, height)
    return first * band + rest - column * height, column


def for_units(block: jax.Array, blocks: int, units: jax.Array, body: Any, init: Any) -> Any:
    """Run body(unit, carry) for the units of one block."""
    mine = lax.div(jnp.maximum(units - block, 0) + blocks - 1, blocks)
    return lax.fori_loop(0, mine, lambda i, carry: body(block + i * blocks, carry), init)
