"""How the kernel of cache_append cuts its work, and how registers hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

type Layout = Any
"""Of registers: `plgpu.Layout` and what is derived from it; jax does not export their type."""

WARPS, LANES = 4, 32
VALUES_PER_THREAD = 64
"""Of one block of many tokens; more would not fit in registers beside what is computed from them."""
FEW_VALUES_PER_THREAD = 16
"""Of one block of few tokens: more blocks fill the GPU, and each is done sooner."""
GROUP = 8
"""Tokens whose transposed values are written together: a run of that many bytes for each dimension. Of prompts that do
not start with a page, more of the larger groups lie across two: 16 and 32 take longer."""
MANY_TOKENS = 257
"""More than decoding takes at once: prompts are among them, whose tokens follow each other in their pages."""


@dataclass(frozen=True)
class Config:
    """Tunables."""

    heads_per_block: int
    """kv heads of one token that a block takes; it divides them."""
    values_apart: bool
    """Whether transposed values are written by blocks of their own, `GROUP` tokens each."""


def choose(tokens: int, kv_heads: int, q_per_kv: int, head_dim: int) -> Config:
    """What was fastest on an H200."""
    most = VALUES_PER_THREAD if tokens >= MANY_TOKENS else FEW_VALUES_PER_THREAD
    fits = most * WARPS * LANES // ((q_per_kv + 2) * head_dim)
    heads = max(heads for heads in range(1, kv_heads + 1) if kv_heads % heads == 0 and heads <= max(1, fits))
    return Config(heads, values_apart=tokens >= MANY_TOKENS)


def spread(rows: tuple[int, ...], shared: int, itemsize: int) -> Layout:
    """A layout of [*rows, columns] whose rows never cross a warp, with up to 16 bytes side by side in a thread.

    shared: a divisor of the columns; arrays of any multiple of it have the same rows in the same threads.
    """
    widths = [1 << bits for bits in range(4, -1, -1) if shared % (1 << bits) == 0 and (itemsize << bits) <= 16]
    return min((_layout((*rows, shared), width, len(rows)) for width in widths), key=lambda pair: pair[0])[1]


def spread_columns(rows: int, columns: int, side_by_side: int = 1) -> Layout:
    """A layout of [rows, columns, 1], one value at a time. side_by_side: rows that a warp takes at once."""
    return _layout((rows, columns, 1), 1, 2, (side_by_side, LANES // side_by_side, 1))[1]


def _layout(
    sizes: tuple[int, ...], width: int, warp_axes: int, most: tuple[int, ...] | None = None
) -> tuple[int, Layout]:
    """Threads that hold each value, and the layout of `sizes`, with `width` values of the last axis in each thread.

    Lanes go to the last axes first, to each at most `most`; warps to the first axes, of `warp_axes`.
    """
    rank = len(sizes)
    lanes, left = [1] * rank, LANES
    for axis in reversed(range(rank)):
        units = sizes[axis] // width if axis == rank - 1 else sizes[axis]
        lanes[axis] = math.gcd(units, left if most is None else min(left, most[axis]))
        left //= lanes[axis]
    warps, idle = [1] * rank, WARPS
    for axis in range(warp_axes):
        warps[axis] = math.gcd(sizes[axis] // lanes[axis], idle)
        idle //= warps[axis]
    vector = (*[1] * (rank - 1), width)
    warp_tile = tuple(n * w for n, w in zip(lanes, vector, strict=True))
    tile = tuple(n * w for n, w in zip(warp_tile, warps, strict=True))
    found = mgpu.TiledLayout(
        plgpu.Tiling((tile, warp_tile, vector)),
        (*_copies(idle), *range(-3 * rank, -2 * rank)),
        (*_copies(left), *range(-2 * rank, -rank)),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return idle * left, plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)


def _copies(times: int) -> list[plgpu.Replicated]:
    return [plgpu.Replicated(times)] if times > 1 else []
