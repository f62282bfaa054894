"""What one block of the kernel does: tokens from the projection to registers, and from there to their places."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_append.config import GROUP, Layout, spread, spread_columns
from pallas_kernels.kv_pages import LARGEST

F32 = jnp.float32
AT_ONCE = 4
"""Tokens not in a row whose values are loaded together."""
SMALLEST = 1e-30
type Refs = dict[str, Any]
"""By name: the arguments of the kernel, in GPU memory."""
type Pieces = list[jax.Array]
"""Registers that together hold [heads, vectors, head_dim] f32: the halves that turn, then the rest."""


@dataclass(frozen=True)
class Block:
    """Static shapes and options. A value of 8 bits that lies transposed is handled as [..., head_dim, 1]."""

    tokens: int
    heads: int
    """kv heads of a block."""
    q_per_kv: int
    head_dim: int
    pairs: int
    norm_eps: float
    itemsize: int
    num_pages: int
    stored: jnp.dtype
    v_transposed: bool
    values_apart: bool
    group: int = GROUP
    """Tokens of a block of values."""

    def append(self, refs: Refs, token: Any, part: Any) -> None:
        """One token's queries and key, and its value unless `values_apart`, for the `part`-th of its kv heads."""
        heads = pl.ds(part * self.heads, self.heads)
        page, place = refs["page_ids"][token], pl.ds(refs["offsets"][token], 1)
        rows = refs["qkv"].at[token, heads]
        q, k = self.load(rows.at[:, pl.ds(0, self.q_per_kv)]), self.load(rows.at[:, pl.ds(self.q_per_kv, 1)])
        layout = spread_columns(self.heads, self.head_dim)
        if not self.v_transposed:
            v = self.load(rows.at[:, pl.ds(self.q_per_kv + 1, 1)])
        elif not self.values_apart:
            v = [load(refs["columns"].at[token, heads, self.q_per_kv + 1], layout)]
        self.store(refs["q"].at[token, heads], self.turn(q, refs, token, "q_norm"))

        @pl.when(page < self.num_pages)
        def _() -> None:
            where = (page, heads, place)
            self.write_rows(refs, "k", self.turn(k, refs, token, "k_norm"), where)
            if not self.v_transposed:
                self.write_rows(refs, "v", v, where)
            elif not self.values_apart:
                self.write_columns(refs, v[0], layout, page, heads, place)

    @property
    def columns(self) -> list[slice]:
        """The dimensions of each piece."""
        ends = [0, self.pairs, 2 * self.pairs, self.head_dim]
        return [slice(start, end) for start, end in itertools.pairwise(ends) if end > start]

    def layout(self, vectors: int) -> Layout:
        """Of a piece of [heads, vectors, head_dim]: every piece has the same rows in the same threads."""
        return spread((self.heads, vectors), math.gcd(*(c.stop - c.start for c in self.columns)), self.itemsize)

    def load(self, source: Any) -> Pieces:
        """source: [heads, vectors, head_dim]"""
        layout = self.layout(source.shape[1])
        return [load(source.at[:, :, columns], layout) for columns in self.columns]

    def store(self, target: Any, x: Pieces) -> None:
        """target: [heads, vectors, head_dim]"""
        for columns, piece in zip(self.columns, x, strict=True):
            target.at[:, :, columns][...] = piece.astype(target.dtype)

    def turn(self, x: Pieces, refs: Refs, token: Any, norm: str) -> Pieces:
        """RMSNorm and RoPE."""
        layout = self.layout(x[0].shape[1])

        def widen(source: Any, shape: tuple[int, ...]) -> jax.Array:
            return broadcast(load(source, layout.reduce((0, 1))), shape, (2,), layout)

        if norm in refs:
            squares = sum((piece * piece).sum(axis=2) for piece in x)
            inverse = lax.rsqrt(squares * (1 / self.head_dim) + self.norm_eps)
            scales = [widen(refs[norm].at[c], piece.shape) for c, piece in zip(self.columns, x, strict=True)]
            x = [p * broadcast(inverse, p.shape, (0, 1), layout) * s for p, s in zip(x, scales, strict=True)]
        if not self.pairs:
            return x
        low, high, *rest = x
        cos, sin = (widen(refs[name].at[token], low.shape) for name in ("cos", "sin"))
        return [low * cos - high * sin, high * cos + low * sin, *rest]

    def write_rows(self, refs: Refs, name: str, x: Pieces, where: tuple[Any, ...]) -> None:
        """One token's keys, or its values not transposed. where: page, heads, place"""
        if name + "_scales" in refs:
            scale, x = quantized(x, self.layout(1), 2, self.stored)
            refs[name + "_scales"].at[where][...] = scale
        self.store(refs[name].at[where], x)

    def write_columns(self, refs: Refs, v: jax.Array, layout: Layout, page: Any, heads: Any, place: Any) -> None:
        """One token's values, transposed. v: [heads, head_dim, 1]"""
        if "v_scales" in refs:
            scale, (v,) = quantized([v], layout, 1, self.stored)
            refs["v_scales"].at[page, heads, place, 0][...] = scale
        refs["v"].at[page, heads, :, place, 0][...] = v.astype(self.stored)

    def write_values(self, refs: Refs, group: Any, head: Any) -> None:
        """Values of `group` tokens for one kv head: at once if they follow each other in a page, else one by one."""
        start = group * self.group
        rows = [jnp.minimum(start + i, self.tokens - 1) for i in range(self.group)]
        page, offset = refs["page_ids"][start], refs["offsets"][start]
        in_a_row = (page < self.num_pages) & (start + self.group <= self.tokens)
        for i, row in enumerate(rows[1:], 1):
            in_a_row &= (refs["page_ids"][row] == page) & (refs["offsets"][row] == offset + i)

        @pl.when(in_a_row)
        def _() -> None:
            layout = spread_columns(self.group, self.head_dim, side_by_side=self.group)
            x = load(refs["columns"].at[pl.ds(start, self.group), head, self.q_per_kv + 1], layout)
            places = pl.ds(offset, self.group)
            if "v_scales" in refs:
                scale, (x,) = quantized([x], layout, 1, self.stored)
                refs["v_scales"].at[page, head, places][...] = scale
            refs["v"].at[page, head, :, places].transpose((1, 0, 2))[...] = x.astype(self.stored)

        @pl.when(jnp.logical_not(in_a_row))
        def _() -> None:
            layout, one = spread_columns(1, self.head_dim), pl.ds(head, 1)

            def write(step: Any, carry: None) -> None:
                tokens = [start + step * AT_ONCE + i for i in range(AT_ONCE)]
                rows = [jnp.minimum(token, self.tokens - 1) for token in tokens]
                values = [load(refs["columns"].at[row, one, self.q_per_kv + 1], layout) for row in rows]
                places = [(refs["page_ids"][row], pl.ds(refs["offsets"][row], 1)) for row in rows]
                for token, x, (page, place) in zip(tokens, values, places, strict=True):
                    written = functools.partial(self.write_columns, refs, x, layout, page, one, place)
                    pl.when((token < self.tokens) & (page < self.num_pages))(written)

            lax.fori_loop(0, self.group // AT_ONCE, write, None)


def load(source: Any, layout: Layout) -> jax.Array:
    return plgpu.load(source, layout=layout, optimized=False).astype(F32)


def broadcast(x: jax.Array, shape: tuple[int, ...], dims: tuple[int, ...], layout: Layout) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, dims), layout)


def quantized(x: Pieces, layout: Layout, axis: int, dtype: jnp.dtype) -> tuple[jax.Array, Pieces]:
    """Scales, and values that only need a cast. Each of x: three dimensions, `axis` the one that shares a scale."""
    peak = jnp.abs(x[0]).max(axis=axis)
    for piece in x[1:]:
        peak = jnp.maximum(peak, jnp.abs(piece).max(axis=axis))
    scale = peak / LARGEST[dtype.name]
    # A division for each value would take longer; so small a scale has no inverse, and what it scales is stored as 0.
    inverse = 1.0 / jnp.where(scale < SMALLEST, jnp.ones_like(scale), scale)
    dims = tuple(d for d in range(3) if d != axis)
    x = [piece * broadcast(inverse, piece.shape, dims, layout) for piece in x]
    return scale, [jnp.round(piece).astype(jnp.int32) for piece in x] if dtype == jnp.int8 else x
