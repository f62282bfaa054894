"""The sizes a kernel of paged_prefill is built for, and its shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import swizzled
from pallas_kernels.paged_prefill.config import CONSUMERS, ROWS, Config

SMALLEST_SWIZZLE = 32
"""Bytes."""


@dataclass(frozen=True)
class Shapes:
    """Static sizes; all of them key the compiled kernel."""

    config: Config
    tokens: int
    kv_heads: int
    q_per_kv: int
    head_dim: int
    page_size: int
    dtype: Any
    """Of queries, results and what the matrix unit multiplies."""
    cache_dtype: Any
    scale: float
    causal: bool
    window: int | None
    soft_cap: float | None
    blocks: int
    interpreted: bool

    @property
    def slab(self) -> int:
        """Columns of a tile that lie together in shared memory: one swizzled line."""
        return plgpu.find_swizzle(self.head_dim * self.itemsize * 8) // self.itemsize

    @property
    def slabs(self) -> int:
        return self.head_dim // self.slab

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def copy_keys(self) -> int:
        """Tokens of a page that one copy brings."""
        return min(self.page_size, self.config.keys)

    @property
    def copies(self) -> int:
        """Copies that fill the keys, or the values, of a step."""
        return self.config.keys // self.copy_keys

    @property
    def quantized(self) -> bool:
        """Whether the cache is in 8 bits, with scales, values with their tokens innermost."""
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def value_rows(self) -> int:
        """Of a page of values whose rows are dimensions: whole warpgroups' worth, the last ones unused."""
        return pl.cdiv(self.head_dim, ROWS) * ROWS

    @property
    def head_groups(self) -> int:
        """Tiles of one set of tokens."""
        return self.kv_heads * self.q_per_kv // self.config.heads

    @property
    def exp2_scale(self) -> float:
        """Scores times this are powers of two."""
        return math.log2(math.e) * (self.scale if self.soft_cap is None else self.soft_cap)

    def row_tiles(self) -> Any:
        """Memory of each warpgroup's rows, [slabs, CONSUMERS, tokens, heads, slab] to the copy engine (which takes any
        row), and [slabs, CONSUMERS, ROWS, slab] to the matrix unit: the same bytes. The interpreter gets the first."""
        shape = (self.slabs, CONSUMERS, self.config.rows_tokens, self.config.heads, self.slab)
        tiling, swizzle = swizzled(self.dtype, self.slab)
        copied = plgpu.SMEM(shape, self.dtype, transforms=(swizzle,))
        if self.interpreted:
            return copied
        rows = plgpu.SMEM((self.slabs, CONSUMERS, ROWS, self.slab), self.dtype, transforms=(tiling, swizzle))
        return plgpu.RefUnion(rows, copied)

    def rows(self, ref: Any) -> Any:
        """Row tiles as the matrix unit sees them: [slabs, CONSUMERS, ROWS, slab]."""
        return ref[0]

    def copied(self, ref: Any) -> Any:
        """Row tiles as the copy engine sees them: [slabs, CONSUMERS, tokens, heads, slab]."""
        return ref if self.interpreted else ref[1]

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        config, keys = self.config, self.config.keys
        keys_ring = (config.stages, keys, self.head_dim)
        values_ring = keys_ring
        if self.quantized:
            values_ring = (config.stages * self.copies, self.value_rows, self.copy_keys)
        loaded = plgpu.Barrier(num_arrivals=1 if self.quantized else self.copies, num_barriers=config.stages)
        used = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages)
        memory = {
            "q": self.row_tiles(),
            "k": tile(self.dtype, keys_ring),
            "v": tile(self.dtype, values_ring),
            "q_full": plgpu.Barrier(num_arrivals=self.slabs * CONSUMERS),
            "q_free": plgpu.Barrier(num_arrivals=CONSUMERS),
            "k_full": loaded,
            "k_free": used,
            "v_full": loaded,
            "v_free": used,
            "v_dirty": plgpu.Barrier(num_arrivals=self.copies),
        }
        if not config.share_output:
            memory["out"] = self.row_tiles()
        if self.quantized:
            memory |= {
                "k8": tile(self.cache_dtype, keys_ring[1:], self.slab),
                "v8": tile(self.cache_dtype, (self.copies, *values_ring[1:])),
                "scales": plgpu.SMEM((2 * keys,), jnp.float32),  # of keys, then of values
                "k8_full": plgpu.Barrier(num_arrivals=2 * self.copies),
                "v8_full": plgpu.Barrier(num_arrivals=2 * self.copies),
            }
        return memory

    def values(self, ring: Any, slot: jax.Array) -> list[Any]:
        """A step's values in pieces: [keys, head_dim], or, of an 8-bit cache, [head_dim, keys of a copy] each."""
        if not self.quantized:
            return [ring.at[slot]]
        # Indices that depend on nothing traced cannot enter a run_state.
        return [ring.at[slot * self.copies + copy, : self.head_dim] for copy in range(self.copies)]

    def columns(self, slab: int) -> pl.Slice:
        """Of head_dim, those of one slab."""
        return pl.ds(slab * self.slab, self.slab)


def tile(dtype: Any, shape: tuple[int, ...], columns: int | None = None) -> Any:
    """Shared memory of tiles that lie in the last two dimensions; columns: what it is read in pieces of."""
    columns = columns or shape[-1]
    if columns * jnp.dtype(dtype).itemsize % SMALLEST_SWIZZLE:  # lines of 16 bytes stay as they are
        return plgpu.SMEM(shape, dtype)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype, columns))
