"""Split-KV paged decode attention on Hopper's matrix and copy units.

A block is one warpgroup. It walks its run of tiles (see plan.py), copying tiles ahead into a ring in shared memory, and
several blocks share an SM, so that each one's waiting is filled by the others.

Operands are swapped: S^T = K Q^T and O^T = V^T P^T, so that keys and head_dim fill the 64 rows the matrix unit demands
and the few query vectors are its columns, padded to 8: an accumulator is a few registers.

An 8-bit cache stays 8-bit up to the matrix unit. Its other operand is the sum of two 8-bit terms, high + low / 2^n:
exact for q of 8 significant bits, good to 2^-9 (fp8) or 2^-14 (int8) for P. A page's P is relative to the page's own
largest weight, and includes the values' scales, so the terms use their range whatever the scales and scores are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mosaic import interpreted, swizzled
from pallas_kernels.paged_decode import combine
from pallas_kernels.paged_decode.config import KEYS, REDUCTION_BYTES, Config, round_up
from pallas_kernels.paged_decode.plan import SLOTS, Plan
from pallas_kernels.paged_decode.terms import Terms

F32, I32 = jnp.float32, jnp.int32
LOG2E = math.log2(math.e)
LOWEST = -1e30  # of a maximum over nothing: finite, so that differences of two are 0 and not NaN
SMALLEST_SCALE = 1e-20
WG, WG_T = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
ROW, COL = WG.reduce(1), WG.reduce(0)  # of vectors over keys, and over query vectors


def over_keys(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (0,))


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (1,))


def attend(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    plan: Plan,
    sinks: jax.Array | None,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: Any,
) -> jax.Array:
    """q: [batch, kv_heads, queries * q_per_kv, head_dim]; the rest as in `api.paged_decode`."""
    config = plan.config
    rows = q.shape[2]
    if rows > 8 and rows % 8:  # what the copy engine pads to whole tiles is less than a tile, or nothing
        q = jnp.pad(q, ((0, 0), (0, 0), (0, -rows % 8), (0, 0)))
    body = Body(q, pages, config, sinks is not None, scale, plan.window, soft_cap)
    scales = () if pages.k_scales is None or pages.v_scales is None else (pages.k_scales, pages.v_scales)
    extra = () if sinks is None else (sinks,)
    inputs = (q, pages.k, pages.v, *scales, block_tables, plan.runs, plan.sequences, *extra)
    slots = SLOTS * config.blocks
    out, parts, stats = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((slots, config.columns, round_up(body.padded, combine.THREADS)), F32),
            jax.ShapeDtypeStruct((slots, 2, config.columns), F32),
        ),
        grid=(config.blocks,),
        grid_names=("block",),
        scratch_types=[body.scratch()],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        **interpreted(interpret),
    )(*inputs)
    return combine.merge(out, parts, stats, plan, sinks, interpret=interpret)[:, :, :rows]


class Body:
    """The kernel's code: __call__ is what a block runs."""

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
        self.page, self.tile = pages.page_size, config.tile
        self.pages_per_tile, self.tiles_per_page = max(1, self.tile // self.page), max(1, self.page // self.tile)
        self.piece = min(self.page, self.tile)  # keys of one copy
        self.padded = round_up(self.dim, KEYS)  # rows of O^T
        self.terms = Terms(self.dtype) if pages.quantized else None
        self.columns = config.columns
        self.query_slots = 2 if self.terms is None else 1  # terms are a copy of q
        self.shape = (self.tile, self.columns)

    def scratch(self) -> dict[str, Any]:
        tile, dim, stages, columns, terms = self.tile, self.padded, self.config.stages, self.columns, self.terms
        smem = plgpu.SMEM
        memory = {
            "q": smem((self.query_slots, columns, dim), self.q_dtype, transforms=swizzled(self.q_dtype, self.dim)),
            "out": smem((columns, dim), self.q_dtype, transforms=swizzled(self.q_dtype, self.dim)),
            "k": smem((stages, tile, dim), self.dtype, transforms=swizzled(self.dtype, self.dim)),
            "q_full": plgpu.Barrier(num_barriers=self.query_slots),
        }
        arrivals = self.pages_per_tile * (1 if terms is None else 2)
        for name in "kv":
            memory[name + "_full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
        if terms is None:
            wide = swizzled(self.dtype, self.dim)
            memory["v"] = smem((stages, tile, dim), self.dtype, transforms=wide)
            memory["p"] = smem((columns, tile), self.dtype, transforms=wide)
        else:
            turned = swizzled(self.dtype, self.piece)
            memory["v"] = smem((stages, self.pages_per_tile, dim, self.piece), self.dtype, transforms=turned)
            memory["q_terms"] = smem((2, columns, dim), self.dtype, transforms=swizzled(self.dtype, self.dim))
            memory["p"] = smem((2, columns, tile), self.dtype, transforms=turned)
            memory["k_scales"] = memory["v_scales"] = smem((stages, tile), F32)
        return memory

    def __call__(self, *refs: Any) -> None:
        names = ["q", "k", "v", *(["k_scales", "v_scales"] if self.terms else []), "tables", "runs", "sequences"]
        names += ["sinks"] if self.has_sinks else []
        names += ["out", "parts", "stats"]
        self.g = dict(zip(names, refs, strict=False))
        self.s = refs[-1]
        self.block = lax.axis_index("block")
        run = [self.g["runs"][self.block, i] for i in range(13)]
        sequence, head, at, self.count, self.segments, *known = run
        row = (sequence, head, *known)

        self.copy_query(jnp.int32(0), row)
        cursor = (jnp.int32(0), at, row, self.page_ids(row, at))
        cursors = [cursor]
        for _ in range(self.config.stages):
            cursors.append(self.advance(cursors[-1]))
        for ready in cursors[:-1]:
            self.copy_tile(ready)
        self.clear_padding()
        lax.fori_loop(0, self.segments, self.segment, (jnp.int32(0), at, row, cursors[-1]))
        plgpu.wait_smem_to_gmem(0)

    # Where the work is

    def next_row(self, row: tuple) -> tuple:
        """What follows a row of work; its numbers were read a sequence ahead."""
        sequence, head, _, _, _, following, *ahead = row

        def other_sequence() -> tuple:
            beyond = [self.g["sequences"][ahead[3], i] for i in range(4)]
            return (following, jnp.int32(0), *ahead, *beyond)

        return lax.cond(head + 1 < self.config.head_tiles, lambda: (sequence, head + 1, *row[2:]), other_sequence)

    def page_ids(self, row: tuple, at: jax.Array) -> list[jax.Array]:
        """Pages of a tile. Past the sequence's last page that one again: its keys are masked."""
        sequence, _, first, _, length, *_ = row
        last = lax.div(jnp.maximum(length, 1) - 1, jnp.int32(self.page))
        page = lax.div((first + at) * self.pages_per_tile, jnp.int32(self.tiles_per_page))
        return [self.g["tables"][sequence, jnp.minimum(page + i, last)] for i in range(self.pages_per_tile)]

    def advance(self, cursor: tuple) -> tuple:
        turn, at, row, _ = cursor
        crossing = at + 1 >= row[3]
        row = lax.cond(crossing, lambda: self.next_row(row), lambda: row)
        at = jnp.where(crossing, 0, at + 1)
        return turn + 1, at, row, self.page_ids(row, at)

    def split_head(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """kv head and first query vector of a head tile."""
        tiles = self.config.row_tiles
        if tiles == 1:
            return head, head * 0  # not a constant: those are checked to be in bounds
        return lax.div(head, jnp.int32(tiles)), lax.rem(head, jnp.int32(tiles)) * self.columns

    # Copies

    def vectors(self, ref: Any, sequence: jax.Array, head: jax.Array) -> Any:
        """A head tile of q or of the output. The copy engine fills with zeros, and leaves out, what is past its end."""
        head, first = self.split_head(head)
        return ref.at[sequence, head, pl.ds(pl.multiple_of(first, 8), self.columns), self.whole_dim(head)]

    def whole_dim(self, head: jax.Array) -> Any:
        """Of head_dim, padded with zeros to what the matrix unit takes. `head`: any number known at run time only."""
        if self.padded == self.dim:
            return slice(None)
        return pl.ds(pl.multiple_of(head * 0, KEYS), self.padded)

    def copy_query(self, turn: jax.Array, row: tuple) -> None:
        """Start copying the q of the block's row number `turn`, if it has that many."""

        @pl.when(turn < self.segments)
        def _() -> None:
            slot = lax.rem(turn, jnp.int32(self.query_slots))
            target = self.s["q"].at[slot]
            plgpu.copy_gmem_to_smem(self.vectors(self.g["q"], *row[:2]), target, self.s["q_full"].at[slot])

    def copy_tile(self, cursor: tuple) -> None:
        """Start copying a tile into its place in the ring, which must be free."""
        turn, at, row, ids = cursor

        @pl.when(turn < self.count)
        def _() -> None:
            slot = lax.rem(turn, jnp.int32(self.config.stages))
            head, _ = self.split_head(row[1])
            offset = pl.multiple_of(lax.rem(row[2] + at, jnp.int32(self.tiles_per_page)) * self.piece, self.piece)
            keys = pl.ds(offset, self.piece) if self.tiles_per_page > 1 else slice(None)
            dim = self.whole_dim(head)
            for name in "kv":
                full = self.s[name + "_full"].at[slot]
                for i, page in enumerate(ids):
                    piece = pl.ds(i * self.piece, self.piece)
                    source, target = self.g[name].at[page, head], self.s[name].at[slot]
                    if name == "k" or self.terms is None:
                        source, target = source.at[keys, dim], target.at[piece]
                    else:
                        source, target = source.at[dim, keys], target.at[i]
                    plgpu.copy_gmem_to_smem(source, target, full)
                    if self.terms is not None:
                        scales = self.g[name + "_scales"].at[page, head, keys]
                        plgpu.copy_gmem_to_smem(scales, self.s[name + "_scales"].at[slot, piece], full)

    def write_out(self, sequence: jax.Array, head: jax.Array) -> None:
        """Start copying finished vectors from shared memory to the output."""
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.s["out"], self.vectors(self.g["out"], sequence, head))

    def clear_padding(self) -> None:
        """Zeros for sequences of length 0, a few by each block, while the first tiles are on their way."""
        blocks = self.config.blocks

        def clear(turn: jax.Array, none: None) -> None:
            sequence = self.block + turn * blocks

            @pl.when(self.g["sequences"][sequence, 1] == 0)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0)
                zeros = plgpu.layout_cast(jnp.zeros((self.padded, self.columns), F32), WG_T)
                self.s["out"].transpose((1, 0))[...] = zeros.astype(self.q_dtype)

                lax.fori_loop(0, self.config.head_tiles, lambda head, none: self.write_out(sequence, head), None)

        lax.fori_loop(0, lax.div(self.batch - 1 - self.block + blocks, jnp.int32(blocks)), clear, None)

    # One row of work, or this block's part of it

    def segment(self, turn: jax.Array, carry: tuple) -> tuple:
        done, at, row, cursor = carry
        following = self.next_row(row)
        slot = lax.rem(turn, jnp.int32(self.query_slots))
        plgpu.barrier_wait(self.s["q_full"].at[slot])
        q = self.s["q"].at[slot]
        unit = None if self.terms is None else self.split_query(self.terms, slot)
        self.copy_query(turn + 1, following)
        tiles, length = row[3], row[4]
        head, first = self.split_head(row[1])
        steps = jnp.minimum(tiles - at, self.count - done)
        limit = self.limits(length, first)
        init = (
            plgpu.layout_cast(jnp.full((self.columns,), LOWEST, F32), COL),
            plgpu.layout_cast(jnp.zeros(self.shape, F32), WG),
            plgpu.layout_cast(jnp.zeros((self.padded, self.columns), F32), WG),
            cursor,
        )
        step = functools.partial(self.step, done, (row[2] + at) * self.tile, length, limit, q, unit)
        top, weight, acc, cursor = lax.fori_loop(0, steps, step, init)
        weight = weight.sum(axis=0)
        whole = (at == 0) & (steps == tiles)

        @pl.when(whole)
        def _() -> None:
            total = weight
            if self.has_sinks:
                total = total + jnp.exp2(self.sink_logits(head, first) - top)
            share = 1 / jnp.maximum(total, 1e-30)
            done_acc = plgpu.layout_cast(acc * over_columns(share, acc.shape), WG_T)
            plgpu.wait_smem_to_gmem(0)
            self.s["out"].transpose((1, 0))[...] = done_acc.astype(self.q_dtype)
            self.write_out(*row[:2])

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            part = SLOTS * self.block + jnp.minimum(turn, 1)
            mine = self.g["parts"].at[part, :, pl.ds(0, self.padded)]
            mine.transpose((1, 0))[...] = plgpu.layout_cast(acc, WG_T)
            self.g["stats"].at[part, 0][...] = top
            self.g["stats"].at[part, 1][...] = weight

        return done + steps, jnp.int32(0), following, cursor

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

    def sink_logits(self, head: jax.Array, first: jax.Array) -> jax.Array:
        """[columns], in units of log2."""
        group = self.config.q_per_kv
        column = plgpu.broadcasted_iota(I32, (self.columns,), 0, layout=COL) + first
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
        i: jax.Array,
        carry: tuple,
    ) -> tuple:
        """One tile of keys: its largest score, weights and weighted values join the running ones."""
        top, weight, acc, cursor = carry
        turn, base = done + i, start + i * self.tile
        slot = lax.rem(turn, jnp.int32(self.config.stages))
        plgpu.barrier_wait(self.s["k_full"].at[slot])
        key = plgpu.broadcasted_iota(I32, self.shape, 0, layout=WG) + base
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
            v_scales = over_keys(plgpu.load(self.s["v_scales"].at[slot], layout=ROW), self.shape)
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

        # Every thread is past its reads of the tile before this one: its place is free.
        def copy(cursor: tuple) -> tuple:
            self.copy_tile(cursor)
            return self.advance(cursor)

        cursor = lax.cond(turn > 0, copy, lambda cursor: cursor, cursor)
        values = self.weighted(slot)
        if self.terms is not None:
            new = new * (1 / self.terms.unit)
        acc = acc * over_columns(old, acc.shape) + values * over_columns(new, acc.shape)
        return new_top, weight, acc, cursor

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
        return s * over_columns(unit * factor, s.shape) * over_keys(k_scales, s.shape)

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
            v = self.s["v"].at[slot]
            pieces = [v] if self.terms is None else [v.at[i] for i in range(self.pages_per_tile)]
            for i, piece in enumerate(pieces):
                x = plgpu.load(piece, layout=WG)
                key = plgpu.broadcasted_iota(I32, x.shape, 0 if self.terms is None else 1, layout=WG)
                key = key + (base + i * self.piece)
                live = (key < length) & (key >= oldest)
                wide = x if self.terms is None else x.astype(jnp.float16)
                piece[...] = jnp.where(live, wide, jnp.zeros_like(wide)).astype(x.dtype)
