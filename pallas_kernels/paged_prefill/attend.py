"""The consumer warpgroups of paged_prefill: scores, softmax, values, each for its own rows."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.config import ROWS
from pallas_kernels.paged_prefill.products import add_product, scores
from pallas_kernels.paged_prefill.shapes import Shapes
from pallas_kernels.paged_prefill.tiles import Tile, for_each_tile

WG = plgpu.Layout.WGMMA
LOWEST = -1e30
"""Where a running maximum starts; finite, so that a row that sees none of a step's keys stays free of NaN."""


def consume(shapes: Shapes, refs: Any, memory: Any, group: jax.Array) -> None:
    """Compute and store rows `group` of every tile of this block."""
    if shapes.config.pingpong:
        # The second warpgroup starts half a step behind the first, and stays there.
        pl.when(group == 1)(lambda: meet(memory))
    attend = functools.partial(attend_tile, shapes, refs, memory, group)
    for_each_tile(shapes, refs["tiles"], refs["count"], attend, jnp.int32(0))
    if shapes.config.pingpong:
        pl.when(group == 0)(lambda: meet(memory))
    plgpu.wait_smem_to_gmem(0)


def meet(memory: Any) -> None:
    """Wait for the other warpgroup."""
    plgpu.barrier_arrive(memory["turn"])
    plgpu.barrier_wait(memory["turn"])


def attend_tile(shapes: Shapes, refs: Any, memory: Any, group: jax.Array, tile: Tile, used: jax.Array) -> jax.Array:
    """One tile; used: steps of this block so far."""
    first, a, b, end = tile.steps(shapes)
    pl.when(end > first)(lambda: plgpu.barrier_wait(memory["q_full"]))
    limit = last_keys(shapes, tile, group)
    step = functools.partial(attend_step, shapes, memory, group, end, limit)
    state = (*start(shapes, refs, tile), used)
    if shapes.window is not None:
        state = lax.fori_loop(first, a, functools.partial(step, masked=True), state)
    state = lax.fori_loop(a, b, functools.partial(step, masked=False), state)
    state = lax.fori_loop(b, end, functools.partial(step, masked=True), state)
    out, _, total, used = state
    store(shapes, refs, memory, group, tile, out / wide(jnp.maximum(total, 1e-30), out.shape))
    return used


def wide(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number a row, along the row."""
    return lax.broadcast_in_dim(x, shape, (0,))


def last_keys(shapes: Shapes, tile: Tile, group: jax.Array) -> jax.Array:
    """Position of the last key that each row sees, its own. Rows past the tile's last see what that one sees."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WG.reduce(1))
    token = lax.shift_right_logical(row, jnp.full_like(row, shapes.config.heads.bit_length() - 1))
    return jnp.minimum(tile.position + group * shapes.config.rows_tokens + token, tile.end - 1)


def start(shapes: Shapes, refs: Any, tile: Tile) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted values, maximum (of scores as powers of two), sum of weights; a sink is a key already seen."""
    out = plgpu.layout_cast(jnp.zeros((ROWS, shapes.head_dim), jnp.float32), WG)
    if "sinks" not in refs:
        maximum = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), WG.reduce(1))
        return out, maximum, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), WG.reduce(1))
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WG.reduce(1))
    head = row & (shapes.config.heads - 1)
    maximum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), WG.reduce(1))
    for h in range(shapes.config.heads):
        maximum = jnp.where(head == h, refs["sinks"][tile.head + h] * math.log2(math.e), maximum)
    return out, maximum, plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), WG.reduce(1))


def attend_step(
    shapes: Shapes, memory: Any, group: jax.Array, end: jax.Array, limit: jax.Array, j: jax.Array, state: Any, masked: bool
) -> Any:
    """Take in the keys of step j."""
    out, maximum, total, used = state
    pingpong = shapes.config.pingpong
    slot = lax.rem(used, shapes.config.stages)
    plgpu.barrier_wait(memory["k_full"].at[slot])
    s = scores(shapes, memory["q"], group, memory["k"].at[slot], lambda: meet(memory) if pingpong else None)
    plgpu.barrier_arrive(memory["k_free"].at[slot])
    if not shapes.config.share_output:
        pl.when(j == end - 1)(lambda: plgpu.barrier_arrive(memory["q_free"]))

    if shapes.soft_cap is not None:
        s = tanh(s * (shapes.scale / shapes.soft_cap))
    if masked:
        key = j * shapes.config.keys + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WG)
        seen = key <= wide(limit, s.shape)
        if shapes.window is not None:
            seen &= key > wide(limit - shapes.window, s.shape)
        s = jnp.where(seen, s, -jnp.inf)
    new = jnp.maximum(maximum, s.max(axis=1) * shapes.exp2_scale)
    fade = jnp.exp2(maximum - new)
    weights = jnp.exp2(s * shapes.exp2_scale - wide(new, s.shape))
    out *= wide(fade, out.shape)
    total = total * fade + weights.sum(axis=1)
    weights = weights.astype(shapes.dtype)
    if pingpong:
        out, total, new, weights = lax.optimization_barrier((out, total, new, weights))
        plgpu.barrier_arrive(memory["turn"])
    plgpu.barrier_wait(memory["v_full"].at[slot])
    if pingpong:
        plgpu.barrier_wait(memory["turn"])
    out = add_product(shapes, out, weights, memory["v"].at[slot])
    plgpu.barrier_arrive(memory["v_free"].at[slot])
    return out, new, total, used + 1


def tanh(x: jax.Array) -> jax.Array:
    """To 1e-7; the hardware's own is good to 5e-4, of a cap of 50 that is 0.02."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2 * math.log2(math.e))) + 1.0)


def store(shapes: Shapes, refs: Any, memory: Any, group: jax.Array, tile: Tile, out: jax.Array) -> None:
    """Write the rows that belong to the tile, and no others."""
    config = shapes.config
    rows = memory["q" if config.share_output else "out"]
    if not config.share_output:
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
        first, _, _, end = tile.steps(shapes)
        pl.when(end > first)(lambda: plgpu.barrier_arrive(memory["q_free"]))
