"""What stands between an MLP's projections, in operations that Mosaic GPU also has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

type Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"]

ALPHA, LIMIT = 1.702, 7.0
"""Of clamped_silu, as gpt-oss has them."""


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def relu(x: jax.Array) -> jax.Array:
    # `<` keeps a NaN, which a maximum in hardware drops.
    return jnp.where(x < 0.0, jnp.zeros_like(x), x)


def gelu(x: jax.Array, erf: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def gelu_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def erf(x: jax.Array) -> jax.Array:
    """For kernels, which lack it: within 2e-7 (Abramowitz and Stegun 7.1.26)."""
    size = jnp.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = series * jnp.exp(-x * x)
    return jnp.where(x < 0.0, tail - 1.0, 1.0 - tail)


PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": lambda x: relu(x) * relu(x),
}
NAMES: tuple[str, ...] = get_args(Activation.__value__)


def activate(
    activation: str, gate: jax.Array, up: jax.Array | None, erf: Callable[[jax.Array], jax.Array] = jax.lax.erf
) -> jax.Array:
    """activation(gate) · up, or activation(gate) without `up`. gate, up: float32 of one shape.

    clamped_silu is min(gate, 7) · sigmoid(1.702 · gate) · (clip(up, -7, 7) + 1).
    """
    if activation == "clamped_silu":
        assert up is not None, "clamped_silu is gated"
        gate = jnp.minimum(gate, LIMIT)
        return gate * sigmoid(ALPHA * gate) * (jnp.maximum(jnp.minimum(up, LIMIT), -LIMIT) + 1.0)
    out = gelu(gate, erf) if activation == "gelu" else PLAIN[activation](gate)
    return out if up is None else out * up
