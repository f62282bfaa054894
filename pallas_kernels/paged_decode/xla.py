"""paged_decode in plain JAX: pages are gathered some at a time, only as far as the longest sequence reaches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.tiles import Tiles


def paged_decode(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    tiles: Tiles,
) -> jax.Array:
    """q: [batch, queries, kv_heads, q_per_kv, head_dim]; otherwise as in `api.paged_decode`."""
    batch, queries, kv_heads, q_per_kv, head_dim = q.shape
    width = block_tables.shape[1]
    turn = min(max(1, tiles.decode_keys // pages.page_size), width)  # pages of one turn of the loop
    span = turn * pages.page_size
    block_tables = jnp.pad(block_tables, ((0, 0), (0, -width % turn)))
    rows = q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, queries * q_per_kv, head_dim)
    heads = jnp.arange(kv_heads)[None, :, None]
    # [batch, queries * q_per_kv]: how many keys each query sees, and the first of them
    stops = jnp.repeat(lengths[:, None] - jnp.arange(queries - 1, -1, -1), q_per_kv, axis=1)
    row_slopes = None if alibi_slopes is None else jnp.tile(alibi_slopes, (1, queries))[..., None]
    firsts = jnp.zeros_like(stops) if window is None else jnp.maximum(stops - window, 0)
    if chunk is not None:
        firsts = jnp.maximum(firsts, (stops - 1) // chunk * chunk)

    def take(i: int | jax.Array, running: softmax.Running) -> softmax.Running:
        ids = jax.lax.dynamic_slice_in_dim(block_tables, i * turn, turn, axis=1)[:, None, :]
        k, v = pages.gather(ids, heads, q.dtype)  # [batch, kv_heads, span, head_dim]
        positions = i * span + jnp.arange(span)
        valid = (positions < stops[..., None]) & (positions >= firsts[..., None])
        bias = None if row_slopes is None else row_slopes * (positions + 1 - stops[:, None, :, None])
        return softmax.update(running, rows, k, v, valid[:, None], scale, soft_cap, bias)

    running = softmax.start(rows.shape)
    if turn == width:
        running = take(0, running)
    elif tiles.decode_whole_tables:
        running = jax.lax.fori_loop(0, -(-width // turn), take, running)
    else:
        running = jax.lax.fori_loop(firsts.min() // span, (lengths.max() + span - 1) // span, take, running)
    row_sinks = None if sinks is None else jnp.tile(sinks, (1, queries))[None]
    out = softmax.finish(running, q.dtype, row_sinks)
    return out.reshape(batch, kv_heads, queries, q_per_kv, head_dim).transpose(0, 2, 1, 3, 4)
