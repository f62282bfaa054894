"""An 8-bit cache for the matrix unit: the producer warpgroup widens pages on their way into the ring.

Pages arrive in memory of their own, one step at a time; the next step's are on their way while this step's are widened.
Values stay as they are stored, tokens innermost.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.config import ROWS
from pallas_kernels.paged_prefill.pages import copies, live
from pallas_kernels.paged_prefill.shapes import Shapes
from pallas_kernels.paged_prefill.tiles import Tile

LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X
"""Reads four of eight bits at a time where WGMMA would read two."""


def fetch(shapes: Shapes, refs: Any, memory: Any, tile: Tile, j: jax.Array) -> None:
    """Start loading the first step of a tile."""
    fetch_keys(shapes, refs, memory, tile, j)
    fetch_values(shapes, refs, memory, tile, j)


def fetch_keys(shapes: Shapes, refs: Any, memory: Any, tile: Tile, j: jax.Array) -> None:
    head = lax.div(tile.head, shapes.q_per_kv)
    for rows, page, offset in copies(shapes, refs, tile, j):
        plgpu.copy_gmem_to_smem(refs["k"].at[page, head, offset], memory["k8"].at[rows], memory["k8_full"])
        fetch_scales(shapes, refs["k_scales"].at[page, head, offset], memory["scales"].at[rows], memory["k8_full"])


def fetch_values(shapes: Shapes, refs: Any, memory: Any, tile: Tile, j: jax.Array) -> None:
    head = lax.div(tile.head, shapes.q_per_kv)
    dims = pl.ds(0, shapes.head_dim)
    for copy, (_rows, page, offset) in enumerate(copies(shapes, refs, tile, j)):
        target = memory["v8"].at[copy, dims]
        plgpu.copy_gmem_to_smem(refs["v"].at[page, head, dims, offset], target, memory["v8_full"])
        scales = memory["scales"].at[value_scales(shapes, copy)]
        fetch_scales(shapes, refs["v_scales"].at[page, head, offset], scales, memory["v8_full"])


def fetch_scales(shapes: Shapes, source: Any, target: Any, full: Any) -> None:
    """Copies that know the ends of arrays write at multiples of 128 bytes, to which scales of 16 tokens do not keep;
    copies of mere bytes at multiples of 16."""
    aligned = shapes.copy_keys * 4 % 128 == 0
    plgpu.copy_gmem_to_smem(source, target, full, oob_mode=None if aligned else plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def widen_keys(shapes: Shapes, refs: Any, memory: Any, tile: Tile, j: jax.Array, slot: jax.Array) -> None:
    plgpu.barrier_wait(memory["k8_full"])

    @pl.loop(0, shapes.config.keys // ROWS)
    def _(part: jax.Array) -> None:  # a loop, unlike its unrolling, needs the registers of one turn
        rows = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)
        scales = plgpu.load(memory["scales"].at[rows], layout=LAYOUT.reduce(1))

        @pl.loop(0, shapes.slabs)
        def _(slab: jax.Array) -> None:
            columns = pl.ds(pl.multiple_of(slab * shapes.slab, shapes.slab), shapes.slab)
            x = plgpu.load(memory["k8"].at[rows, columns], layout=LAYOUT).astype(jnp.float32)
            x *= lax.broadcast_in_dim(scales, x.shape, (0,))
            memory["k"].at[slot, rows, columns][...] = x.astype(shapes.dtype)

    plgpu.commit_smem()
    plgpu.barrier_arrive(memory["k_full"].at[slot])
    pl.when(j + 1 < tile.steps(shapes)[3])(lambda: fetch_keys(shapes, refs, memory, tile, j + 1))


def widen_values(shapes: Shapes, refs: Any, memory: Any, tile: Tile, j: jax.Array, slot: jax.Array) -> None:
    """Values that are no token's are cleared: 0 x NaN is NaN."""
    plgpu.barrier_wait(memory["v8_full"])
    low, high = live(shapes, tile, j)
    size = shapes.copy_keys

    @pl.loop(0, shapes.copies)
    def _(copy: jax.Array) -> None:
        scales = plgpu.load(memory["scales"].at[value_scales(shapes, copy)], layout=LAYOUT.reduce(0))
        token = copy * size + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=LAYOUT.reduce(0))
        seen = (token >= low) & (token < high)
        scales = jnp.where(seen, scales, jnp.zeros_like(scales))

        @pl.loop(0, shapes.value_rows // ROWS)
        def _(part: jax.Array) -> None:
            rows = pl.ds(pl.multiple_of(part * ROWS, ROWS), ROWS)
            x = plgpu.load(memory["v8"].at[copy, rows], layout=LAYOUT).astype(jnp.float32)
            x *= lax.broadcast_in_dim(scales, x.shape, (1,))
            if not jnp.issubdtype(shapes.cache_dtype, jnp.integer):
                x = jnp.where(lax.broadcast_in_dim(seen, x.shape, (1,)), x, jnp.zeros_like(x))
            memory["v"].at[slot * shapes.copies + copy, rows][...] = x.astype(shapes.dtype)

    plgpu.commit_smem()
    plgpu.barrier_arrive(memory["v_full"].at[slot])
    pl.when(j + 1 < tile.steps(shapes)[3])(lambda: fetch_values(shapes, refs, memory, tile, j + 1))


def value_scales(shapes: Shapes, copy: int | jax.Array) -> pl.Slice:
    """Where the scales of a copy's values lie."""
    start = shapes.config.keys + copy * shapes.copy_keys
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, shapes.copy_keys), shapes.copy_keys)
