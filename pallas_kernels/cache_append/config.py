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
"""Of one block; more would not fit in registers beside what is computed from them."""


GROUP = 16
"""Tokens whose transposed values are written together: a run of that many bytes for each dimension."""
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
    fits = max(1, VALUES_PER_THREAD * WARPS * LANES // ((q_per_kv + 2) * head_dim))
    heads = max(heads for heads in range(1, kv_heads + 1) if kv_heads % heads == 0 and heads <= fits)
    return Config(heads, values_apart=tokens >= MANY_TOKENS)


def spread(rows: tuple[int, ...], shared: int, itemsize: int) -> Layout:
    """A layout of [*rows, columns] whose rows never cross a warp, with up to 16 bytes side by side in a thread.

    shared: a divisor of the columns; arrays of any multiple of it have the same rows in the same threads.
    """
    widths = [1 << bits for bits in range(4, -1, -1) if shared % (1 << bits) == 0 and (itemsize << bits) <= 16]
    return min((_layout(rows, (shared,), width) for width in widths), key=lambda pair: pair[0])[1]


def spread_columns(rows: int, columns: int, side_by_side: int = 1) -> Layout:
    """A layout of [rows, columns, 1], one value at a time. side_by_side: rows that a warp takes at once."""
    return _layout((rows,), (columns, 1), 1, LANES // side_by_side)[1]


def _layout(rows: tuple[int, ...], columns: tuple[int, ...], width: int, lanes: int = LANES) -> tuple[int, Layout]:
    """Threads that hold each value, and the layout of [*rows, *columns].

    Lanes go to columns first, at most `lanes` of them, then to rows; warps to rows; `width` values to each thread.
    """
    sizes = (*rows, *columns)
    units = (*sizes[:-1], sizes[-1] // width)
    lanes_of, left, most = [1] * len(sizes), LANES, lanes
    for axis in reversed(range(len(sizes))):
        lanes_of[axis] = math.gcd(units[axis], min(left, most) if axis >= len(rows) else left)
        left, most = left // lanes_of[axis], most // lanes_of[axis]
    warps_of, idle = [1] * len(sizes), WARPS
    for axis, size in enumerate(rows):
        warps_of[axis] = math.gcd(size // lanes_of[axis], idle)
        idle //= warps_of[axis]
    last = [1] * (len(sizes) - 1) + [width]
    block = [n * w for n, w in zip(lanes_of, last, strict=True)]
    tiling = plgpu.Tiling((tuple(n * w for n, w in zip(block, warps_of, strict=True)), tuple(block), tuple(last)))
    rank = len(sizes)
    found = mgpu.TiledLayout(
        tiling,
        (*_copies(idle), *range(-3 * rank, -2 * rank)),
        (*_copies(left), *range(-2 * rank, -rank)),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return idle * left, plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)


def _copies(times: int) -> list[plgpu.Replicated]:
    return [plgpu.Replicated(times)] if times > 1 else []
