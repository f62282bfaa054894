"""Attention in pieces: a running softmax lets keys and values be read a chunk at a time (Milakov et al. 2018)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

PRECISION = jax.lax.Precision.HIGHEST
"""float32 means float32, also where the hardware would rather round inputs to TF32."""


class Running(NamedTuple):
    """Softmax so far: the largest score, the sum of weights, and the weighted sum of values, all float32."""

    maximum: jax.Array
    """[..., queries]"""
    total: jax.Array
    """[..., queries]"""
    values: jax.Array
    """[..., queries, head_dim]"""


def start(shape: tuple[int, ...]) -> Running:
    """Nothing seen yet; shape: [..., queries, head_dim]."""
    return Running(jnp.full(shape[:-1], -jnp.inf), jnp.zeros(shape[:-1]), jnp.zeros(shape))


def update(
    running: Running,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    valid: jax.Array,
    scale: float,
    soft_cap: float | None = None,
    bias: jax.Array | None = None,
) -> Running:
    """Take in more keys. q: [..., queries, head_dim]; k, v: [..., keys, head_dim]; valid: to [..., queries, keys].

    soft_cap: scores become soft_cap * tanh(score / soft_cap); bias: to [..., queries, keys], added to them.

    Values no query may see are zeroed by select: a weight of zero does not stop a NaN in an unused slot.
    """
    scores = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=jnp.float32, precision=PRECISION) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(valid, scores, -jnp.inf)
    maximum = jnp.maximum(running.maximum, scores.max(-1))
    finite = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weights = jnp.exp(scores - finite[..., None])
    fade = jnp.exp(running.maximum - finite)
    v = jnp.where(valid.any(-2)[..., None], v, jnp.zeros((), v.dtype))
    new = jnp.einsum(
        "...qk,...kd->...qd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=PRECISION
    )
    return Running(maximum, running.total * fade + weights.sum(-1), running.values * fade[..., None] + new)


def finish(running: Running, dtype: jax.typing.DTypeLike, sinks: jax.Array | None = None) -> jax.Array:
    """The weighted mean, [..., queries, head_dim]; zero for a query that saw no key.

    sinks: to [..., queries] f32, the score of one more key whose value is zero (Xiao et al. 2023).
    """
    total = running.total
    if sinks is not None:
        seen = ~jnp.isneginf(running.maximum)
        total = total + jnp.where(seen, jnp.exp(sinks - jnp.where(seen, running.maximum, 0.0)), 0.0)
    total = jnp.where(total == 0.0, 1.0, total)
    return (running.values / total[..., None]).astype(dtype)
