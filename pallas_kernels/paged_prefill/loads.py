"""The producer warpgroup of paged_prefill: queries, keys and values into shared memory, a few steps ahead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.config import CONSUMERS, ROWS
from pallas_kernels.paged_prefill.pages import copies, live
from pallas_kernels.paged_prefill.shapes import Shapes
from pallas_kernels.paged_prefill.tiles import Tile, for_each_tile
from pallas_kernels.paged_prefill.widen import fetch, widen_keys, widen_values


def produce(shapes: Shapes, refs: Any, memory: Any) -> None:
    """Load what the consumers of this block need, in the order in which they need it."""

    keys, values = (widen_keys, widen_values) if shapes.quantized else (load_keys, load_values)

    def tile(tile: Tile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        loaded, tiles = carry  # steps, and tiles that see a key, so far
        first, _, _, end = tile.steps(shapes)
        if shapes.quantized:
            pl.when(end > first)(lambda: fetch(shapes, refs, memory, tile, first))

        def step(j: jax.Array, loaded: jax.Array) -> jax.Array:
            slot = lax.rem(loaded, shapes.config.stages)
            pl.when(loaded >= shapes.config.stages)(lambda: plgpu.barrier_wait(memory["k_free"].at[slot]))
            keys(shapes, refs, memory, tile, j, slot)

            @pl.when(j == first)
            def _() -> None:
                pl.when(tiles > 0)(lambda: plgpu.barrier_wait(memory["q_free"]))
                load_queries(shapes, refs, memory, tile)

            pl.when(loaded >= shapes.config.stages)(lambda: plgpu.barrier_wait(memory["v_free"].at[slot]))
            values(shapes, refs, memory, tile, j, slot)
            return loaded + 1

        return lax.fori_loop(first, end, step, loaded), tiles + (end > first).astype(jnp.int32)

    loaded, tiles = for_each_tile(shapes, refs["tiles"], refs["count"], tile, (jnp.int32(0), jnp.int32(0)))
    drain(shapes, memory, loaded, tiles)


def drain(shapes: Shapes, memory: Any, loaded: jax.Array, tiles: jax.Array) -> None:
    """Await the last use of everything: a block must not end while its memory is in use."""
    stages = shapes.config.stages
    for behind in range(stages):

        @pl.when(loaded > behind)
        def _(behind: int = behind) -> None:
            slot = lax.rem(loaded - 1 - behind, stages)
            plgpu.barrier_wait(memory["k_free"].at[slot])
            plgpu.barrier_wait(memory["v_free"].at[slot])

    pl.when(tiles > 0)(lambda: plgpu.barrier_wait(memory["q_free"]))


def load_queries(shapes: Shapes, refs: Any, memory: Any, tile: Tile) -> None:
    """The rows of a tile, and whatever follows them: rows past its last are computed and not stored."""
    tokens = shapes.config.rows_tokens
    heads = pl.ds(tile.head, shapes.config.heads)
    for slab in range(shapes.slabs):
        for group in range(CONSUMERS):
            rows = pl.ds(tile.row + group * tokens, tokens)
            source = refs["q"].at[rows, heads, shapes.columns(slab)]
            plgpu.copy_gmem_to_smem(source, shapes.copied(memory["q"]).at[slab, group], memory["q_full"])


def load_keys(shapes: Shapes, refs: Any, memory: Any, tile: Tile, j: jax.Array, slot: jax.Array) -> None:
    head = lax.div(tile.head, shapes.q_per_kv)
    for rows, page, offset in copies(shapes, refs, tile, j):
        plgpu.copy_gmem_to_smem(refs["k"].at[page, head, offset], memory["k"].at[slot, rows], memory["k_full"].at[slot])


def load_values(shapes: Shapes, refs: Any, memory: Any, tile: Tile, j: jax.Array, slot: jax.Array) -> None:
    """A step that reaches past the sequence's end is cleared there before it is handed over: 0 x NaN is NaN."""
    head, keys = lax.div(tile.head, shapes.q_per_kv), shapes.config.keys
    values, full = memory["v"].at[slot], memory["v_full"].at[slot]

    def copy(barrier: Any) -> None:
        for rows, page, offset in copies(shapes, refs, tile, j):
            plgpu.copy_gmem_to_smem(refs["v"].at[page, head, offset], values.at[rows], barrier)

    whole = (j + 1) * keys <= tile.length
    pl.when(whole)(lambda: copy(full))

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        copy(memory["v_dirty"])
        plgpu.barrier_wait(memory["v_dirty"])
        clear(shapes, values, *live(shapes, tile, j))
        for _ in range(shapes.copies):
            plgpu.barrier_arrive(full)


def clear(shapes: Shapes, values: Any, low: jax.Array, high: jax.Array) -> None:
    """Zero the rows of `values` below low and from high on."""

    @pl.loop(0, shapes.config.keys // ROWS)
    def _(piece: jax.Array) -> None:  # a loop, unlike its unrolling, needs the registers of one turn
        start = pl.multiple_of(piece * ROWS, ROWS)

        @pl.loop(0, shapes.slabs)
        def _(slab: jax.Array) -> None:
            columns = pl.ds(pl.multiple_of(slab * shapes.slab, shapes.slab), shapes.slab)
            part = values.at[pl.ds(start, ROWS), columns]
            x = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            row = start + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where((row >= low) & (row < high), x, jnp.zeros_like(x))

    plgpu.commit_smem()
