"""paged_decode in plain JAX: pages are gathered a chunk at a time, only as far as the longest sequence reaches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.tiles import Tiles


def paged_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    tiles: Tiles,
) -> jax.Array:
    """Shapes as in `api.paged_decode`."""
    page_size, width = k_pages.shape[2], block_tables.shape[1]
    chunk = min(max(1, tiles.decode_keys // page_size), width)
    span = chunk * page_size
    block_tables = jnp.pad(block_tables, ((0, 0), (0, -width % chunk)))
    heads = jnp.arange(q.shape[1])[None, :, None]
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)

    def take(i: int | jax.Array, running: softmax.Running) -> softmax.Running:
        pages = jax.lax.dynamic_slice_in_dim(block_tables, i * chunk, chunk, axis=1)[:, None, :]
        # [batch, kv_heads, chunk, page_size, head_dim]: one tile per (page, head), no transpose
        k, v = (x[pages, heads].reshape(*q.shape[:2], span, -1) for x in (k_pages, v_pages))
        positions = i * span + jnp.arange(span)
        valid = (positions < lengths[:, None]) & (positions >= first[:, None])
        return softmax.update(running, q, k, v, valid[:, None, None, :], scale)

    running = softmax.start(q.shape)
    if chunk == width:
        running = take(0, running)
    elif tiles.decode_whole_tables:
        running = jax.lax.fori_loop(0, -(-width // chunk), take, running)
    else:
        running = jax.lax.fori_loop(first.min() // span, (lengths.max() + span - 1) // span, take, running)
    return softmax.finish(running, q.dtype)
