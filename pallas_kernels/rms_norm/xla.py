"""rms_norm in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    """x: [..., embed]; scale: [embed]."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def add_rms_norm(x: jax.Array, delta: jax.Array, scale: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """x, delta: [..., embed]; scale: [embed]."""
    total = x + delta
    return total, rms_norm(total, scale, eps=eps)
