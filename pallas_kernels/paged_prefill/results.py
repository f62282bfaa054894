"""Results of a tile to global memory: its own rows, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.shapes import Shapes
from pallas_kernels.paged_prefill.tiles import Tile


def store(shapes: Shapes, refs: Any, memory: Any, group: jax.Array, tile: Tile, out: jax.Array) -> None:
    """Write a warpgroup's rows. out: [ROWS, head_dim] f32."""
    config = shapes.config
    rows = memory["q" if config.share_output else "out"]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
    for slab in range(shapes.slabs):
        part = out[:, slab * shapes.slab : (slab + 1) * shapes.slab].astype(shapes.dtype)
        if shapes.interpreted:
            rows[slab, group] = part.reshape(config.rows_tokens, config.heads, shapes.slab)
        else:
            shapes.rows(rows).at[slab, group][...] = part
    plgpu.commit_smem()

    tokens = jnp.minimum(jnp.maximum(tile.tokens - group * config.rows_tokens, 0), config.rows_tokens)
    row, heads = tile.row + group * config.rows_tokens, pl.ds(tile.head, config.heads)
    size = config.rows_tokens
    while size > shapes.tokens:
        size //= 2
    while size:  # any number of tokens is a sum of powers of two

        @pl.when((tokens & size) != 0)
        def _(size: int = size) -> None:
            at = tokens & ~(2 * size - 1)
            for slab in range(shapes.slabs):
                source = shapes.copied(rows).at[slab, group, pl.ds(at, size)]
                target = refs["out"].at[pl.ds(row + at, size), heads, shapes.columns(slab)]
                plgpu.copy_smem_to_gmem(source, target)

        size //= 2
    if config.share_output:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
