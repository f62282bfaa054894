"""Which pages a step of the keys lies on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_prefill.shapes import Shapes
from pallas_kernels.paged_prefill.tiles import Tile


def copies(shapes: Shapes, refs: Any, tile: Tile, j: jax.Array) -> Iterator[tuple[pl.Slice, jax.Array, pl.Slice]]:
    """(rows of the step, page, rows of the page) of each copy of step j.

    Pages before the first visible one, and after the last, may be anyone's: one of the sequence's own is read instead.
    """
    page_size, size = shapes.page_size, shapes.copy_keys
    low, high = lax.div(tile.first_key(shapes.window), page_size), lax.div(tile.seen(shapes) - 1, page_size)
    for copy in range(shapes.copies):
        key = j * shapes.config.keys + copy * size
        index = jnp.minimum(jnp.maximum(lax.div(key, page_size), low), high)
        offset = pl.multiple_of(lax.rem(key, page_size), size) if size < page_size else 0
        yield pl.ds(copy * size, size), refs["table"][tile.sequence, index], pl.ds(offset, size)


def live(shapes: Shapes, tile: Tile, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows low to high - 1 of step j hold tokens of the sequence; what others hold is unknown."""
    first_page, keys = lax.div(tile.first_key(shapes.window), shapes.page_size), shapes.config.keys
    return first_page * shapes.page_size - j * keys, tile.length - j * keys
