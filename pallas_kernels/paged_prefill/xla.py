"""paged_prefill in plain JAX: blocks of query rows, each over just the pages its last row can see."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.tiles import Tiles


def paged_prefill(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    query_start: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    tiles: Tiles,
) -> jax.Array:
    """Shapes as in `api.paged_prefill`. A block holds rows of one sequence; sequences need not start on a multiple."""
    tokens, kv_heads, q_per_kv, head_dim = q.shape
    page_size, width = pages.page_size, block_tables.shape[1]
    rows = min(tiles.prefill_rows, tokens)
    turn = min(max(1, tiles.prefill_keys // page_size), width)  # pages of one turn of the loop
    span = turn * page_size
    block_tables = jnp.pad(block_tables, ((0, 0), (0, -width % turn)))
    q = jnp.pad(q, ((0, rows), (0, 0), (0, 0), (0, 0)))

    counts = query_start[1:] - query_start[:-1]
    blocks = (counts + rows - 1) // rows
    ends = jnp.cumsum(blocks)

    row_sinks = None if sinks is None else jnp.repeat(sinks, rows, axis=1)
    row_slopes = None if alibi_slopes is None else jnp.repeat(alibi_slopes, rows, axis=1)[..., None]

    def attend_block(block: jax.Array, out: jax.Array) -> jax.Array:
        sequence = jnp.searchsorted(ends, block, side="right")
        row = (block - (ends[sequence] - blocks[sequence])) * rows  # of the sequence's chunk
        here = query_start[sequence] + row
        q_block = jax.lax.dynamic_slice_in_dim(q, here, rows)  # [rows, kv_heads, q_per_kv, head_dim]
        q_block = q_block.transpose(1, 2, 0, 3).reshape(kv_heads, q_per_kv * rows, head_dim)
        position = lengths[sequence] - counts[sequence] + row + jnp.arange(rows)
        last = lengths[sequence] - 1
        lasts = jnp.minimum(position, last) if causal else jnp.full_like(position, last)
        firsts = jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)
        if chunk is not None:
            firsts = jnp.maximum(firsts, position // chunk * chunk)

        def take(i: jax.Array, running: softmax.Running) -> softmax.Running:
            ids = jax.lax.dynamic_slice(block_tables, (sequence, i * turn), (1, turn))
            k, v = pages.gather(ids, jnp.arange(kv_heads)[:, None], q.dtype)  # [kv_heads, span, head_dim]
            keys = i * span + jnp.arange(span)
            valid = (keys <= lasts[:, None]) & (keys >= firsts[:, None])
            bias = None if row_slopes is None else row_slopes * (keys - jnp.tile(position, q_per_kv)[:, None])
            return softmax.update(running, q_block, k, v, jnp.tile(valid, (q_per_kv, 1)), scale, soft_cap, bias)

        running = jax.lax.fori_loop(firsts[0] // span, lasts[-1] // span + 1, take, softmax.start(q_block.shape))
        result = (
            softmax.finish(running, q.dtype, row_sinks)
            .reshape(kv_heads, q_per_kv, rows, head_dim)
            .transpose(2, 0, 1, 3)
        )
        mine = (row + jnp.arange(rows) < counts[sequence])[:, None, None, None]
        old = jax.lax.dynamic_slice_in_dim(out, here, rows)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, result, old), here, axis=0)

    return jax.lax.fori_loop(0, ends[-1], attend_block, jnp.zeros_like(q))[:tokens]
