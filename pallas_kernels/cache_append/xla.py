"""cache_append in plain JAX: one scatter each for keys and values, in place when the pages are donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE on halves, in float32. x: [..., head_dim]; cos, sin: broadcast to [..., head_dim / 2]."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def cache_append(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Shapes as in `api.cache_append`."""
    q = rotate(q, cos[:, None, None, :], sin[:, None, None, :])
    k = rotate(k, cos[:, None, :], sin[:, None, :])
    k_pages = k_pages.at[page_ids, :, offsets].set(k.astype(k_pages.dtype), mode="drop", unique_indices=True)
    v_pages = v_pages.at[page_ids, :, offsets].set(v.astype(v_pages.dtype), mode="drop", unique_indices=True)
    return q, k_pages, v_pages
