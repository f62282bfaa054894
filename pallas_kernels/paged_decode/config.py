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
    """Keys of one step; a multiple of 64."""
    stages: int
    """Tiles in shared memory."""
    blocks: int
    """All resident at once."""

    columns: int
    """Query vectors of a kv head that share its loads: a multiple of 8."""

    @property
    def rows(self) -> int:
        """Query vectors of a sequence and kv head."""
        return self.queries * self.q_per_kv

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.columns)

    @property
    def head_tiles(self) -> int:
        """Rows of work of a sequence: `columns` query vectors of a kv head each."""
        return self.kv_heads * self.row_tiles


HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (16, 32, 64, 128)
SHARED_BYTES = 228 * 1024
"""Of a Hopper SM."""
RESERVED_BYTES = 1024
"""Of them by the system, for each block."""


def obstacle(q_dtype: Any, pages: KVPages, target: Target) -> str | None:
    """Why the kernel cannot run on these dtypes and shapes, if so."""
    if reason := target.lacks_hopper():
        return reason
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
    if pages.page_size < 32:
        return f"page_size is {pages.page_size}; of an 8-bit cache it takes 32 and more"
    if pages.head_dim % 32:
        return f"head_dim is {pages.head_dim}; of an 8-bit cache it takes multiples of 32"
    return None


def shared_bytes(config: Config, head_dim: int, dtype: Any) -> int:
    """Shared memory of a block, without barriers."""
    size, padded = jnp.dtype(dtype).itemsize, round_up(head_dim, KEYS)
    tile = 2 * config.tile * padded * size
    query = 2 * padded * config.columns  # as q is, or as the output
    if size == 2:
        return config.stages * tile + 3 * query + 2 * config.columns * config.tile + REDUCTION_BYTES
    terms = 2 * config.columns * (padded + config.tile)
    return config.stages * (tile + 8 * config.tile) + 2 * query + terms + REDUCTION_BYTES


def choose(
    queries: int, kv_heads: int, q_per_kv: int, head_dim: int, dtype: Any, target: Target, **changes: int
) -> Config:
    """dtype: of the cache. changes: fields to set otherwise."""
    columns = min(32 if head_dim <= 128 else 16 if head_dim <= 192 else 8, round_up(queries * q_per_kv, 8))
    fields = {"queries": queries, "kv_heads": kv_heads, "q_per_kv": q_per_kv, "tile": KEYS, "columns": columns}
    per_core, stages = (2, 3) if jnp.dtype(dtype).itemsize == 2 else (3, 4)
    if columns > 16:
        per_core = min(per_core, 2)  # registers
    while True:
        config = Config(**(fields | {"stages": stages, "blocks": target.cores * per_core} | changes))
        if shared_bytes(config, head_dim, dtype) + RESERVED_BYTES + 512 <= SHARED_BYTES // per_core:
            return config
        if per_core > 1:
            per_core -= 1
        else:
            stages -= 1
