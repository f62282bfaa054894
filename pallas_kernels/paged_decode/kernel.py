"""Split-KV paged decode attention on Hopper's matrix and copy units.

A block is one warpgroup. It walks its run of tiles (see plan.py), copying tiles ahead into a ring in shared memory, and
several blocks share an SM, so that each one's waiting is filled by the others. A row that several blocks share is
merged by the one that finishes last.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mosaic import interpreted
from pallas_kernels.paged_decode.config import KEYS, REDUCTION_BYTES, round_up
from pallas_kernels.paged_decode.counter import count_arrivals
from pallas_kernels.paged_decode.plan import COUNTERS, SLOTS, Plan
from pallas_kernels.paged_decode.steps import (
    COL,
    F32,
    LANES,
    LOWEST,
    WARPS,
    WG,
    WG_T,
    Steps,
    over_columns,
    over_rows,
)

FEW = 4
"""Parts of most rows of a batch, at most."""


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
    shape, rows = q.shape, q.shape[2]
    if rows > 8 and rows % 8:  # what the copy engine pads to whole tiles is less than a tile, or nothing
        q = jnp.pad(q, ((0, 0), (0, 0), (0, -rows % 8), (0, 0)))
    body = Body(q, pages, config, sinks is not None, scale, plan.window, soft_cap)
    scales = () if pages.k_scales is None or pages.v_scales is None else (pages.k_scales, pages.v_scales)
    extra = () if sinks is None else (sinks,)
    inputs = (q, pages.k, pages.v, *scales, block_tables, plan.runs, plan.sequences, plan.pages, *extra)
    slots = SLOTS * config.blocks
    out, *_ = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(shape, q.dtype),
            jax.ShapeDtypeStruct((slots, config.columns, body.padded), F32),
            jax.ShapeDtypeStruct((slots, 2, config.columns), F32),
        ),
        grid=(config.blocks,),
        grid_names=("block",),
        scratch_types=[body.scratch()],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=REDUCTION_BYTES
        ),
        kernel_name="paged_decode",
        **interpreted(interpret),
    )(*inputs)
    return out


class Body(Steps):
    """The kernel's code: __call__ is what a block runs."""

    def __call__(self, *refs: Any) -> None:
        names = [
            "q",
            "k",
            "v",
            *(["k_scales", "v_scales"] if self.terms else []),
            "tables",
            "runs",
            "sequences",
            "pages",
        ]
        names += ["sinks"] if self.has_sinks else []
        names += ["out", "parts", "stats"]
        self.g = dict(zip(names, refs, strict=False))
        self.s = refs[-1]
        self.block = lax.axis_index("block")
        run = [self.g["runs"][self.block, i] for i in range(COUNTERS)]
        stages, pages = range(self.config.stages), range(self.pages_per_tile)
        first, *loaded = [[self.g["pages"][self.block, stage, i] for i in pages] for stage in stages]
        sequence, head, at, self.count, self.segments, *known = run
        self.shares, row = known[8:], (sequence, head, *known[:8])

        self.copy_query(jnp.int32(0), row)
        cursor = (jnp.int32(0), at, row, first)
        for ids in (*loaded, None):
            self.copy_tile(cursor)
            cursor = self.advance(cursor, ids)
        self.clear_padding()
        nothing = jnp.int32(0)
        init = (nothing, at, row, cursor, (nothing, nothing, sequence, head))
        *_, left = lax.fori_loop(0, self.segments, self.segment, init)
        pl.when((left[0] + left[1]) > 0)(lambda: self.arrive(row, left))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

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

    def advance(self, cursor: tuple, ids: list[jax.Array] | None = None) -> tuple:
        turn, at, row, _ = cursor
        crossing = at + 1 >= row[3]
        row = lax.cond(crossing, lambda: self.next_row(row), lambda: row)
        at = jnp.where(crossing, 0, at + 1)
        return turn + 1, at, row, self.page_ids(row, at) if ids is None else ids

    def split_head(self, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """kv head and first query vector of a head tile."""
        tiles = self.config.row_tiles
        if tiles == 1:
            return head, head * 0  # not a constant: those are checked to be in bounds
        return lax.div(head, jnp.int32(tiles)), lax.rem(head, jnp.int32(tiles)) * self.columns

    # Copies

    def whole_dim(self, head: jax.Array) -> Any:
        """Of head_dim, padded with zeros to what the matrix unit takes. `head`: any number known at run time only."""
        if self.padded == self.dim:
            return slice(None)
        return pl.ds(pl.multiple_of(head * 0, KEYS), self.padded)

    def page_rows(self, tile: jax.Array, head: jax.Array) -> Any:
        """Of a page, the rows of one copy, padded with zeros."""
        if self.piece > self.page:
            return pl.ds(pl.multiple_of(head * 0, self.page), self.piece)
        if self.tiles_per_page == 1:
            return slice(None)
        return pl.ds(pl.multiple_of(lax.rem(tile, jnp.int32(self.tiles_per_page)) * self.piece, self.piece), self.piece)

    def copy_query(self, turn: jax.Array, row: tuple) -> None:
        """Start copying the q of the block's row number `turn`, if it has that many."""

        @pl.when(turn < self.segments)
        def _() -> None:
            slot = lax.rem(turn, jnp.int32(self.query_slots))
            head, first = self.split_head(row[1])
            # The copy engine fills with zeros what is past the end.
            columns = pl.ds(pl.multiple_of(first, 8), self.columns)
            source = self.g["q"].at[row[0], head, columns, self.whole_dim(head)]
            plgpu.copy_gmem_to_smem(source, self.s["q"].at[slot], self.s["q_full"].at[slot])

    def copy_tile(self, cursor: tuple) -> None:
        """Start copying a tile into its place in the ring, which must be free."""
        turn, at, row, ids = cursor

        @pl.when(turn < self.count)
        def _() -> None:
            slot = lax.rem(turn, jnp.int32(self.config.stages))
            head, _ = self.split_head(row[1])
            keys, dim = self.page_rows(row[2] + at, head), self.whole_dim(head)
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
                        self.copy_scales(scales, self.s[name + "_scales"].at[slot, piece], full)

    def copy_scales(self, source: Any, target: Any, full: Any) -> None:
        plgpu.copy_gmem_to_smem(source, target, full)

    def refill(self, turn: jax.Array, cursor: tuple) -> tuple:
        """The next tile into the place of the one before `turn`."""

        def copy(cursor: tuple) -> tuple:
            self.copy_tile(cursor)
            return self.advance(cursor)

        return lax.cond(turn > 0, copy, lambda cursor: cursor, cursor)

    def write_out(self, sequence: jax.Array, head: jax.Array) -> None:
        """Start copying finished vectors from shared memory to the output.

        What is contiguous goes in one copy, which ends where it is told to: nothing is left out for being outside.
        """
        plgpu.commit_smem()
        config, out = self.config, self.s["out"]
        head, first = self.split_head(head)
        if config.row_tiles == 1 and self.padded == self.dim:
            plgpu.copy_smem_to_gmem(out.at[pl.ds(0, config.rows)], self.g["out"].at[sequence, head])
            return
        for row in range(config.live_columns):

            @pl.when(first + row < config.rows)
            def _(row: int = row) -> None:
                target = self.g["out"].at[sequence, head, pl.ds(first + row, 1)]
                plgpu.copy_smem_to_gmem(out.at[pl.ds(row, 1), pl.ds(0, self.dim)], target)

    def clear_padding(self) -> None:
        """Zeros for sequences of length 0, a few by each block, while the first tiles are on their way."""
        blocks = self.config.blocks

        def clear(turn: jax.Array, none: None) -> None:
            sequence = self.block + turn * blocks

            @pl.when(self.g["sequences"][sequence, 1] == 0)
            def _() -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                zeros = plgpu.layout_cast(jnp.zeros((self.padded, self.columns), F32), WG_T)
                self.s["out"].transpose((1, 0))[...] = zeros.astype(self.q_dtype)

                lax.fori_loop(0, self.config.head_tiles, lambda head, none: self.write_out(sequence, head), None)

        lax.fori_loop(0, lax.div(self.batch - 1 - self.block + blocks, jnp.int32(blocks)), clear, None)

    # One row of work, or this block's part of it

    def segment(self, turn: jax.Array, carry: tuple) -> tuple:
        done, at, row, cursor, left = carry
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
        step = functools.partial(self.step, done, (row[2] + at) * self.tile, length, limit, q, unit, self.refill)
        top, weight, acc, cursor = lax.fori_loop(0, steps, step, init)
        weight = weight.sum(axis=0)
        whole = (at == 0) & (steps == tiles)

        def finish() -> jax.Array:
            total = weight
            if self.has_sinks:
                total = total + jnp.exp2(self.sink_logits(head, first, self.columns, COL) - top)
            scaled = plgpu.layout_cast(acc * over_columns(1 / jnp.maximum(total, 1e-30), acc.shape), WG_T)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.s["out"].transpose((1, 0))[...] = scaled.astype(self.q_dtype)
            self.write_out(*row[:2])
            return jnp.int32(0)

        leaves = lax.cond(whole, finish, lambda: self.leave(turn, top, weight, acc))
        left = (jnp.where(turn == 0, leaves, left[0]), jnp.where(turn == 0, 0, leaves), row[0], row[1])
        return done + steps, jnp.int32(0), following, cursor, left

    # Rows that several blocks share

    def shared(self, which: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the block's first row, or its last: the slot of the row's first part, and how many parts it has."""
        first, last, *parts = self.shares
        return jnp.where(which == 0, first, last), jnp.where(which == 0, parts[0], parts[1])

    def leave(self, turn: jax.Array, top: jax.Array, weight: jax.Array, acc: jax.Array) -> jax.Array:
        """Leave this block's part of a row for the block that comes last."""
        mine = SLOTS * self.block + jnp.minimum(turn, 1)
        self.g["parts"].at[mine].transpose((1, 0))[...] = plgpu.layout_cast(acc, WG_T)
        self.g["stats"].at[mine, 0][...] = top
        self.g["stats"].at[mine, 1][...] = weight
        return jnp.int32(1)

    def arrive(self, row: tuple, left: tuple) -> None:
        """Count this block's parts of rows, and merge rows whose last part that was.

        After all else, once for both rows: it takes several trips to memory, and merging many registers.
        """
        counters, arrivals = [], []
        for which in range(SLOTS):
            first, parts = self.shared(jnp.int32(which))
            counter = COUNTERS + lax.rem(first, jnp.int32(SLOTS))
            counters.append(self.g["runs"].at[lax.div(first, jnp.int32(SLOTS)), pl.ds(counter, 1)])
            arrivals.append(parts * left[which])
        before = count_arrivals(counters, self.s["p"], self.p_transforms, arrivals)

        def merge(which: jax.Array, none: None) -> None:
            def of(first: jax.Array, last: jax.Array) -> jax.Array:
                return jnp.where(which == 0, first, last)

            sequence, head = (of(*pair) for pair in zip(row[:2], left[2:], strict=True))
            last = of(*before) == of(*arrivals) - 1
            pl.when(last)(lambda: self.merge(sequence, head, *self.shared(which)))

        lax.fori_loop(0, SLOTS, merge, None)

    def merge(self, sequence: jax.Array, head: jax.Array, first: jax.Array, parts: jax.Array) -> None:
        """Write a row from its parts: one in slot `first`, the others in the first slots of the blocks that follow.

        They are added in order, so that the sum does not depend on who was last.
        """
        shape = (round_up(self.config.live_columns, WARPS), self.padded)
        vector = 4 if self.padded % (4 * LANES) == 0 else 2
        # A query vector's dimensions are in one warp, vectors in turn.
        layout = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES * vector), (vector,))), (-3,), (-2,), -1)
        columns = pl.ds(0, shape[0])

        def load(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            part = jnp.minimum(number, parts - 1)
            slot = jnp.where(part == 0, first, SLOTS * (lax.div(first, jnp.int32(SLOTS)) + part))
            stats = [self.g["stats"].at[slot, i, columns] for i in range(2)]
            top, weight = (plgpu.load(x, layout=layout.reduce(1), optimized=False) for x in stats)
            acc = plgpu.load(self.g["parts"].at[slot, columns], layout=layout, optimized=False)
            counted = (number < parts).astype(F32)  # the last part is loaded once more in place of none
            return top, weight * counted, acc * counted

        at_once = min(self.config.parts, max(2, self.config.parts * WARPS * 4 * LANES // (shape[0] * shape[1])))

        def add(count: int, i: jax.Array, carry: tuple) -> tuple:
            # Loads are independent of each other, so that they are in flight together.
            found = [load(i * count + j) for j in range(count)]
            top, weight, acc = carry
            new_top = functools.reduce(jnp.maximum, [x for x, _, _ in found], top)
            old = jnp.exp2(top - new_top)
            weight, acc = weight * old, acc * over_rows(old, shape)
            for x, w, a in found:
                part = jnp.exp2(x - new_top)
                weight, acc = weight + w * part, acc + a * over_rows(part, shape)
            return new_top, weight, acc

        def full(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, F32), layout)

        none = (full(LOWEST, shape[:1], layout.reduce(1)), full(0, shape[:1], layout.reduce(1)), full(0, shape, layout))
        few, steps = min(FEW, at_once), lax.div(parts + at_once - 1, jnp.int32(at_once))
        top, weight, acc = lax.cond(
            parts <= few,
            lambda: add(few, jnp.int32(0), none),
            lambda: lax.fori_loop(0, steps, functools.partial(add, at_once), none),
        )
        if self.has_sinks:
            sinks = self.sink_logits(*self.split_head(head), shape[0], layout.reduce(1))
            weight = weight + jnp.exp2(sinks - top)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scaled = acc * over_rows(1 / jnp.maximum(weight, 1e-30), shape)
        self.s["out"].at[columns][...] = scaled.astype(self.q_dtype)
        self.write_out(sequence, head)
