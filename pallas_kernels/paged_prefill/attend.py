"""The consumer warpgroups of paged_prefill: scores, softmax, values, each for its own rows."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.config import ROWS
from pallas_kernels.paged_prefill.products import add_product, scores, scores_and_product
from pallas_kernels.paged_prefill.results import store
from pallas_kernels.paged_prefill.shapes import Shapes
from pallas_kernels.paged_prefill.tiles import Tile, for_each_tile

WG = plgpu.Layout.WGMMA
ROW = WG.reduce(1)
LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Where a running maximum starts; finite, so that a row that sees none of a step's keys stays free of NaN."""


class Softmax(NamedTuple):
    """Of the rows of a warpgroup, over the keys so far; scores are powers of two."""

    weights: jax.Array
    """[ROWS, keys] of the last step's keys, whose values are not in the sum yet."""
    fade: jax.Array
    """[ROWS] f32: what remains of what was summed before the last step."""
    maximum: jax.Array
    """[ROWS] f32"""
    total: jax.Array
    """[ROWS] f32, of the weights."""


def consume(shapes: Shapes, refs: Any, memory: Any, group: jax.Array) -> None:
    """Compute and store rows `group` of every tile of this block."""
    attend = functools.partial(attend_tile, shapes, refs, memory, group)
    for_each_tile(shapes, refs["tiles"], refs["count"], attend, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def attend_tile(shapes: Shapes, refs: Any, memory: Any, group: jax.Array, tile: Tile, used: jax.Array) -> jax.Array:
    """One tile; used: steps of this block so far. Rows that see no key are zero."""
    first, _, _, end = tile.steps(shapes)
    pl.when(end > first)(lambda: attend_keys(shapes, refs, memory, group, tile, used))
    pl.when(end <= first)(lambda: store(shapes, refs, memory, group, tile, no_values(shapes)))
    return used + (end - first)


def attend_keys(shapes: Shapes, refs: Any, memory: Any, group: jax.Array, tile: Tile, used: jax.Array) -> None:
    """A step's scores and the step before's values are multiplied together, so that the matrix unit has work while the
    softmax of the step runs."""
    first, a, b, end = tile.steps(shapes)
    limit = last_keys(shapes, tile, group)
    soften = functools.partial(next_softmax, shapes, limit)

    def begin() -> Softmax:
        slot = lax.rem(used, shapes.config.stages)
        plgpu.barrier_wait(memory["q_full"])
        plgpu.barrier_wait(memory["k_full"].at[slot])
        s = scores(shapes, memory["q"], group, memory["k"], slot)
        keys_used(shapes, memory, slot, first == end - 1)
        return soften(first, s, *start(shapes, refs, tile), masked=True)

    def step(j: jax.Array, state: tuple[jax.Array, Softmax], *, masked: bool) -> tuple[jax.Array, Softmax]:
        out, softmax = state
        turn = used + (j - first)
        slot, before = lax.rem(turn, shapes.config.stages), lax.rem(turn - 1, shapes.config.stages)
        plgpu.barrier_wait(memory["k_full"].at[slot])

        def meanwhile(s: jax.Array) -> Softmax:
            keys_used(shapes, memory, slot, j == end - 1)
            return soften(j, s, softmax.maximum, softmax.total, masked=masked)

        out, new = scores_and_product(shapes, memory, group, slot, before, out, softmax.weights, meanwhile)
        plgpu.barrier_arrive(memory["v_free"].at[before])
        # The matrix unit read the old weights until now: no register of theirs may hold new ones before.
        _, weights, out = lax.optimization_barrier((softmax.weights, new.weights, out))
        return out * wide(new.fade, out.shape), new._replace(weights=weights)

    state = no_values(shapes), begin()
    rest = first + 1
    if shapes.window is not None:
        state = lax.fori_loop(rest, a, functools.partial(step, masked=True), state)
        rest = jnp.maximum(rest, a)
    state = lax.fori_loop(rest, b, functools.partial(step, masked=False), state)
    out, softmax = lax.fori_loop(jnp.maximum(rest, b), end, functools.partial(step, masked=True), state)

    last = lax.rem(used + (end - first) - 1, shapes.config.stages)
    plgpu.barrier_wait(memory["v_full"].at[last])
    out = add_product(shapes, out, softmax.weights, memory["v"], last)
    plgpu.barrier_arrive(memory["v_free"].at[last])
    store(shapes, refs, memory, group, tile, out / wide(softmax.total, out.shape))
    if shapes.config.share_output:
        plgpu.barrier_arrive(memory["q_free"])


def keys_used(shapes: Shapes, memory: Any, slot: jax.Array, last: jax.Array) -> None:
    """Give back the memory of a step's keys, and after a tile's last step that of its queries."""
    plgpu.barrier_arrive(memory["k_free"].at[slot])
    if not shapes.config.share_output:
        pl.when(last)(lambda: plgpu.barrier_arrive(memory["q_free"]))


def wide(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number a row, along the row."""
    return lax.broadcast_in_dim(x, shape, (0,))


def last_keys(shapes: Shapes, tile: Tile, group: jax.Array) -> jax.Array:
    """Position of the last key that each row sees; if causal, its own. Rows past the last see what that one sees."""
    if not shapes.causal:
        return plgpu.layout_cast(jnp.full((ROWS,), tile.length - 1, jnp.int32), ROW)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
    token = lax.shift_right_logical(row, jnp.full_like(row, shapes.config.heads.bit_length() - 1))
    return jnp.minimum(tile.position + group * shapes.config.rows_tokens + token, tile.end - 1)


def no_values(shapes: Shapes) -> jax.Array:
    """[ROWS, head_dim] f32"""
    return plgpu.layout_cast(jnp.zeros((ROWS, shapes.head_dim), jnp.float32), WG)


def start(shapes: Shapes, refs: Any, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Maximum and sum of weights before the first key; a sink is a key already seen."""
    if "sinks" not in refs:
        maximum, total = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
        return plgpu.layout_cast(maximum, ROW), plgpu.layout_cast(total, ROW)
    head = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) & (shapes.config.heads - 1)
    maximum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    for h in range(shapes.config.heads):
        sink = jnp.maximum(refs["sinks"][tile.head + h] * LOG2_E, LOWEST)
        maximum = jnp.where(head == h, sink, maximum)
    return maximum, plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), ROW)


def next_softmax(
    shapes: Shapes, limit: jax.Array, j: jax.Array, s: jax.Array, maximum: jax.Array, total: jax.Array, *, masked: bool
) -> Softmax:
    """Take in the scores of step j. s: [ROWS, keys] f32, not scaled; masked: whether a row may not see all keys."""
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
    return Softmax(weights.astype(shapes.dtype), fade, new, total * fade + weights.sum(axis=1))


def tanh(x: jax.Array) -> jax.Array:
    """To 1e-7; the hardware's own is good to 5e-4, of a cap of 50 that is 0.02."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2_E)) + 1.0)
