"""What a block computes: scores of a tile of keys, their weights, and the weighted sum of values.

Operands are swapped: S^T = K Q^T and O^T = V^T P^T, so that keys and head_dim fill the 64 rows the matrix unit demands
and the few query vectors are its columns, padded to 8: an accumulator is a few registers.

An 8-bit cache stays 8-bit up to the matrix unit. Its other operand is the sum of two 8-bit terms, high + low / 2^n:
exact for q of 8 significant bits, good to 2^-9 (fp8) or 2^-14 (int8) for P. A page's P is relative to the page's own
largest weight, and includes the values' scales, so the terms use their range whatever the scales and scores are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mosaic import swizzled
from pallas_kernels.paged_decode.config import KEYS, Config, round_up
from pallas_kernels.paged_decode.terms import Terms

F32, I32 = jnp.float32, jnp.int32
LOG2E = math.log2(math.e)
LOWEST = -1e30  # of a maximum over nothing: finite, so that differences of two are 0 and not NaN
SMALLEST_SCALE = 1e-20
FAR = 1 << 30
WARPS, LANES = 4, 32
CLEARED_ROWS = 32
"""Of 8-bit values at a time: few, for few registers. A multiple of what `few_rows` spreads over a warpgroup."""
WG, WG_T = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
ROW, COL = WG.reduce(1), WG.reduce(0)  # of vectors over keys, and over query vectors


def over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (0,))


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (1,))


def few_rows(columns: int) -> Any:
    """A layout of 8-bit rows with 8 columns side by side in a thread."""
    lanes = columns // 8
    rows = LANES // lanes
    tile = mgpu.TiledLayout(
        plgpu.Tiling(((WARPS * rows, columns), (rows, columns), (1, 8))), (-6,), (-4, -3), -1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(tile.tiling, tile.warp_dims, tile.lane_dims, tile.vector_dim)


class Steps:
    """Sizes, memory and arithmetic of a block."""

    g: dict[str, Any]
    """Arrays in global memory, by name."""
    s: Any
    """Those of `scratch`."""

    def __init__(
        self,
        q: jax.Array,
        pages: KVPages,
        config: Config,
        has_sinks: bool,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ):
        self.config, self.has_sinks, self.scale, self.window, self.soft_cap = config, has_sinks, scale, window, soft_cap
        self.batch, _, _, self.dim = q.shape
        self.q_dtype, self.dtype = q.dtype, pages.dtype
        self.page, self.tile, self.lines = pages.page_size, config.tile, config.lines
        self.pages_per_tile, self.tiles_per_page = config.pages_per_tile, config.tiles_per_page
        self.piece = self.lines // self.pages_per_tile  # rows of one copy
        self.piece_keys = self.tile // self.pages_per_tile
        self.padded = round_up(self.dim, KEYS)  # rows of O^T
        self.terms = Terms(self.dtype) if pages.quantized else None
        self.columns = config.columns
        self.query_slots = 2 if self.terms is None else 1  # terms are a copy of q
        self.shape = (self.lines, self.columns)
        # Lines of 16 bytes, which the matrix unit does not read, become one of the whole width.
        self.line = self.dim if self.dim * self.dtype.itemsize % 32 == 0 else self.padded
        self.p_transforms = swizzled(self.dtype, self.dim if self.terms is None else self.piece)

    def scratch(self) -> dict[str, Any]:
        lines, dim, stages, columns, terms = self.lines, self.padded, self.config.stages, self.columns, self.terms
        smem = plgpu.SMEM
        memory = {
            "q": smem((self.query_slots, columns, dim), self.q_dtype, transforms=swizzled(self.q_dtype, self.dim)),
            "out": smem((columns, dim), self.q_dtype),
            "k": smem((stages, lines, dim), self.dtype, transforms=swizzled(self.dtype, self.line)),
            "q_full": plgpu.Barrier(num_barriers=self.query_slots),
        }
        arrivals = self.pages_per_tile * (1 if terms is None else 2)
        for name in "kv":
            memory[name + "_full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
        if terms is None:
            wide = swizzled(self.dtype, self.dim)
            memory["v"] = smem((stages, lines, dim), self.dtype, transforms=wide)
            memory["p"] = smem((columns, lines), self.dtype, transforms=self.p_transforms)
        else:
            turned = swizzled(self.dtype, self.piece)
            memory["v"] = smem((stages, self.pages_per_tile, dim, self.piece), self.dtype, transforms=turned)
            memory["q_terms"] = smem((2, columns, dim), self.dtype, transforms=swizzled(self.dtype, self.line))
            memory["p"] = smem((2, columns, lines), self.dtype, transforms=self.p_transforms)
            memory["k_scales"] = memory["v_scales"] = smem((stages, lines), F32)
        return memory

    def split_query(self, terms: Terms, slot: jax.Array) -> jax.Array:
        """Write q as two terms of the cache's dtype; returns their unit, a column."""
        x = plgpu.load(self.s["q"].at[slot].transpose((1, 0)), layout=WG_T)
        x = plgpu.layout_cast(x.astype(F32), WG)
        top = jnp.maximum(jnp.abs(x).max(axis=0), 1e-30)
        if not terms.integer:  # the next power of 2, for exact terms
            top = jnp.exp2(jnp.round(jnp.log2(top) + 0.5))
        unit = top * (1 / terms.unit)
        for part, y in enumerate(terms.split(x * over_columns(1 / unit, x.shape))):
            terms.store(self.s["q_terms"].at[part], y)
        plgpu.commit_smem()
        return unit

    def limits(self, length: jax.Array, first: jax.Array) -> jax.Array:
        """Keys a query vector sees, one past the last: a number, or one for each column."""
        queries = self.config.queries
        if queries == 1:
            return length
        column = plgpu.broadcasted_iota(I32, self.shape, 1, layout=WG) + first
        query = lax.div(column, jnp.full_like(column, self.config.q_per_kv))
        return jnp.minimum(query, queries - 1) + (length - queries + 1)

    def sink_logits(self, head: jax.Array, first: jax.Array, columns: int, layout: Any) -> jax.Array:
        """[columns], in units of log2."""
        group = self.config.q_per_kv
        column = plgpu.broadcasted_iota(I32, (columns,), 0, layout=layout) + first
        member = lax.rem(column, jnp.full_like(column, group))
        logits = jnp.zeros_like(column).astype(F32)
        for i in range(group):
            logits = logits + (member == i).astype(F32) * (self.g["sinks"][head, i] * LOG2E)
        return logits

    def step(
        self,
        done: jax.Array,
        start: jax.Array,
        length: jax.Array,
        limit: jax.Array,
        q: Any,
        unit: jax.Array | None,
        refill: Callable[[jax.Array, tuple], tuple],
        i: jax.Array,
        carry: tuple,
    ) -> tuple:
        """One tile of keys: its largest score, weights and weighted values join the running ones."""
        top, weight, acc, cursor = carry
        turn, base = done + i, start + i * self.tile
        slot = lax.rem(turn, jnp.int32(self.config.stages))
        plgpu.barrier_wait(self.s["k_full"].at[slot])
        key = self.keys(base)
        seen = key < limit
        if self.window is not None:
            seen = seen & (key >= limit - self.window)
        s = self.scores(slot, q, unit)
        if self.soft_cap is not None:  # tanh by exp2: the hardware's own is good to 2^-11 only
            power = jnp.exp2(s * (2 * LOG2E / self.soft_cap))
            s = (self.soft_cap * LOG2E) * (1 - 2 / (power + 1))
        s = jnp.where(seen, s, -jnp.inf)
        plgpu.barrier_wait(self.s["v_full"].at[slot])
        if self.terms is None:
            here = s.max(axis=0)
        else:
            v_scales = over_rows(plgpu.load(self.s["v_scales"].at[slot], layout=ROW), self.shape)
            v_scales = jnp.where(seen, v_scales, 0.0)
            here = (s + jnp.log2(jnp.maximum(v_scales, SMALLEST_SCALE))).max(axis=0)
        here = jnp.maximum(here, LOWEST)
        p = jnp.exp2(s - over_columns(here, s.shape))
        new_top = jnp.maximum(top, here)
        old, new = jnp.exp2(top - new_top), jnp.exp2(here - new_top)
        weight = weight * over_columns(old, p.shape) + p * over_columns(new, p.shape)

        partial = base + self.tile > length
        if self.window is not None:
            partial = partial | (base < (length - self.config.queries + 1 - self.window))
        if self.terms is None:
            p_t = plgpu.layout_cast(p.astype(self.dtype), WG_T)
            self.s["p"].transpose((1, 0))[...] = p_t
            self.clear_values(slot, partial, base, length)
        else:
            for part, y in enumerate(self.terms.split(p * v_scales * self.terms.unit)):
                self.terms.store(self.s["p"].at[part], y)
            if not self.terms.integer:
                self.clear_values(slot, partial, base, length)
        plgpu.commit_smem()

        cursor = refill(turn, cursor)  # every thread is past its reads of the tile before this one: its place is free
        values = self.weighted(slot)
        if self.terms is not None:
            new = new * (1 / self.terms.unit)
        acc = acc * over_columns(old, acc.shape) + values * over_columns(new, acc.shape)
        return new_top, weight, acc, cursor

    def keys(self, base: jax.Array) -> jax.Array:
        """Position of the key in each row of a tile that starts at `base`, over the tile's shape."""
        row = plgpu.broadcasted_iota(I32, self.shape, 0, layout=WG)
        if self.piece == self.piece_keys:
            return row + base
        # Both are powers of two. What pads a page is past every length.
        page, within = lax.div(row, jnp.full_like(row, self.piece)), row & (self.piece - 1)
        return jnp.where(within < self.piece_keys, page * self.piece_keys + within + base, FAR)

    def scores(self, slot: jax.Array, q: Any, unit: jax.Array | None) -> jax.Array:
        """[tile, columns] in units of log2, or as they are if a soft cap comes next."""
        k = self.s["k"].at[slot]
        factor = self.scale * (1 if self.soft_cap is not None else LOG2E)
        if self.terms is None:

            def product(acc: Any) -> jax.Array:
                plgpu.wgmma(acc, k, q.transpose((1, 0)))
                return acc[...]

            return pl.run_scoped(product, plgpu.ACC(self.shape, F32)) * factor
        terms, q = self.terms, self.s["q_terms"]

        def products(high: Any, low: Any) -> tuple[jax.Array, jax.Array]:
            plgpu.wgmma(high, k, q.at[0].transpose((1, 0)))
            plgpu.wgmma(low, k, q.at[1].transpose((1, 0)))
            return high[...], low[...]

        s = terms.join(*pl.run_scoped(products, *[plgpu.ACC(self.shape, terms.sum)] * 2))
        k_scales = plgpu.load(self.s["k_scales"].at[slot], layout=ROW)
        assert unit is not None
        return s * over_columns(unit * factor, s.shape) * over_rows(k_scales, s.shape)

    def weighted(self, slot: jax.Array) -> jax.Array:
        """V^T P^T of a tile: [padded head_dim, columns]."""
        v, p, shape = self.s["v"].at[slot], self.s["p"], (self.padded, self.columns)
        if self.terms is None:

            def product(acc: Any) -> jax.Array:
                plgpu.wgmma(acc, v.transpose((1, 0)), p.transpose((1, 0)))
                return acc[...]

            return pl.run_scoped(product, plgpu.ACC(shape, F32))

        def products(high: Any, low: Any) -> tuple[jax.Array, jax.Array]:
            for part, acc in enumerate((high, low)):
                for i in range(self.pages_per_tile):
                    plgpu.wgmma(acc, v.at[i], p.at[part, :, pl.ds(i * self.piece, self.piece)].transpose((1, 0)))
            return high[...], low[...]

        return self.terms.join(*pl.run_scoped(products, *[plgpu.ACC(shape, self.terms.sum)] * 2))

    def clear_values(self, slot: jax.Array, partial: jax.Array, base: jax.Array, length: jax.Array) -> None:
        """Zero the values that no query sees: 0 times NaN would be NaN."""

        @pl.when(partial)
        def _() -> None:
            oldest = jnp.int32(0) if self.window is None else length - self.config.queries + 1 - self.window
            v, turned = self.s["v"].at[slot], self.terms is not None
            height = CLEARED_ROWS if turned else KEYS
            layout = few_rows(self.piece) if turned else WG

            @pl.loop(0, self.padded // height)
            def _(part: jax.Array) -> None:  # a loop, unlike its unrolling, needs the registers of one turn
                dims = pl.ds(pl.multiple_of(part * height, height), height)
                pieces = [v.at[i, dims] for i in range(self.pages_per_tile)] if turned else [v.at[:, dims]]
                for i, piece in enumerate(pieces):
                    x = plgpu.load(piece, layout=layout, optimized=False)
                    axis = 1 if turned else 0
                    along = layout.reduce(1 - axis)
                    key = plgpu.broadcasted_iota(I32, x.shape[axis : axis + 1], 0, layout=along) + (
                        base + i * self.piece_keys
                    )
                    live = lax.broadcast_in_dim((key < length) & (key >= oldest), x.shape, (axis,))
                    wide = x.astype(jnp.float16) if turned else x
                    piece[...] = jnp.where(live, wide, jnp.zeros_like(wide)).astype(x.dtype)
