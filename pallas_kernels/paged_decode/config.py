"""Sizes of the kernel's tiles, chosen from the shapes by what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.target import Target

KEYS = 64
"""The matrix unit's rows: keys of scores, head_dim of outputs."""


REDUCTION_BYTES = 1024
"""Shared memory in which warps exchange what they reduce."""


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


@dataclass(frozen=True)
class Config:
    """Static: part of what a plan and a kernel are compiled for."""

    queries: int
    """Query tokens of a sequence."""
    kv_heads: int
    q_per_kv: int
    tile: int
    """Keys of one step."""
    lines: int
    """Rows of shared memory that they take, 64: twice as many as keys if pages are padded (`page_lines`)."""
    page_size: int
    stages: int
    """Tiles in shared memory."""
    blocks: int
    """All resident at once."""
    columns: int
    """Query vectors of a kv head that share its loads: a multiple of 8."""
    parts: int
    """Parts of a row that are loaded at once, of 4 vectors of 128: what registers hold."""
    cut: int
    """Parts of a row of few tiles, at most: to merge more would take longer than their blocks save."""
    least: int
    """Tiles of a block at which rows are cut into more parts than that."""

    @property
    def pages_per_tile(self) -> int:
        return max(1, self.tile // self.page_size)

    @property
    def tiles_per_page(self) -> int:
        return max(1, self.page_size // self.tile)

    @property
    def rows(self) -> int:
        """Query vectors of a sequence and kv head."""
        return self.queries * self.q_per_kv

    @property
    def live_columns(self) -> int:
        """Those that hold query vectors of a head tile, at most."""
        return min(self.rows, self.columns)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.columns)

    @property
    def head_tiles(self) -> int:
        """Rows of work of a sequence: `columns` query vectors of a kv head each."""
        return self.kv_heads * self.row_tiles


def page_lines(page_size: int, dtype: Any) -> int:
    """Rows of shared memory for a page. An 8-bit product sums over at least 32 tokens: the copy engine fills a page
    of 16 up with zeros."""
    return max(page_size, 32) if jnp.dtype(dtype).itemsize == 1 else page_size


HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (16, 32, 64, 128)
SHARED_BYTES = 228 * 1024
"""Of a Hopper SM."""
RESERVED_BYTES = 1024
"""Of them by the system, for each block."""
RESIDENT = {
    2: ((2, 3), (1, 3), (1, 2)),
    1: ((4, 4), (4, 3), (4, 2), (3, 4), (3, 3), (3, 2), (2, 4), (2, 3), (2, 2), (1, 4), (1, 2)),
}
"""By bytes of a value: blocks on a core and stages of each, best first."""
ALIGNED = 0.95
"""Of all blocks are enough: the memory is as busy."""
PARTS = {1: 16, 2: 16, 3: 12, 4: 12}
"""By blocks of a core, whose registers they share."""
CUT = {2: (16, 8), 1: (32, 4)}
"""By bytes of a value: `cut` and `least`."""


def obstacle(q_dtype: Any, pages: KVPages, target: Target) -> str | None:
    """Why the kernel cannot run on these dtypes and shapes, if so."""
    if reason := target.lacks_hopper():
        return reason
    if pages.shared:
        return "the keys are the values, too; it reads two pools"
    if pages.head_dim not in HEAD_DIMS:
        return f"head_dim is {pages.head_dim}; it takes {HEAD_DIMS}"
    if pages.page_size not in PAGE_SIZES:
        return f"page_size is {pages.page_size}; it takes {PAGE_SIZES}"
    if jnp.dtype(q_dtype).itemsize != 2:
        return f"q is {jnp.dtype(q_dtype).name}; it takes bfloat16 or float16"
    if not pages.quantized:
        return None if pages.dtype == q_dtype else f"q is {jnp.dtype(q_dtype).name} and the cache {pages.dtype.name}"
    if not pages.v_transposed:
        return "its matrix units read an 8-bit cache only with v_transposed"
    return None


def shared_bytes(config: Config, head_dim: int, dtype: Any) -> int:
    """Shared memory of a block, without barriers."""
    size, padded = jnp.dtype(dtype).itemsize, round_up(head_dim, KEYS)
    tile = 2 * config.lines * padded * size
    query = 2 * padded * config.columns  # as q is, or as the output
    if size == 2:
        return config.stages * tile + 3 * query + 2 * config.columns * config.lines + REDUCTION_BYTES
    terms = 2 * config.columns * (padded + config.lines)
    return config.stages * (tile + 8 * config.lines) + 2 * query + terms + REDUCTION_BYTES


def choose(queries: int, q_per_kv: int, pages: KVPages, target: Target, **changes: int) -> Config:
    """pages: only their shapes count. changes: fields to set otherwise."""
    head_dim, dtype = pages.head_dim, pages.dtype
    columns = min(32 if head_dim <= 128 else 16 if head_dim <= 192 else 8, round_up(queries * q_per_kv, 8))
    tile = KEYS * pages.page_size // page_lines(pages.page_size, dtype)
    fields = {"queries": queries, "kv_heads": pages.kv_heads, "q_per_kv": q_per_kv, "columns": columns}
    fields |= {"tile": tile, "lines": KEYS, "page_size": pages.page_size}
    most = {8: 4, 16: 3}.get(columns, 2)  # blocks on a core, by registers
    cut, least = CUT[jnp.dtype(dtype).itemsize]
    for per_core, stages in RESIDENT[jnp.dtype(dtype).itemsize]:
        blocks = target.cores * per_core
        # With a power of 2 of them, equal sequences are often cut between heads, where there is nothing to merge.
        aligned = 1 << blocks.bit_length() - 1
        if aligned >= ALIGNED * blocks:
            blocks = aligned
        sizes = {"stages": stages, "blocks": blocks, "parts": PARTS[per_core], "cut": cut, "least": least}
        config = Config(**(fields | sizes | changes))
        fits = shared_bytes(config, head_dim, dtype) + RESERVED_BYTES + 512 <= SHARED_BYTES // per_core
        if fits and per_core <= most:
            return config
    raise ValueError(f"no tile of head_dim {head_dim} fits in shared memory; {HEAD_DIMS} do")
