"""Rotary frequencies (Su et al. 2021), how they are stretched past the trained length, and queries that grow there."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxinfer.config import QueryScaling, RopeConfig


def cos_sin(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The turn of each pair of dimensions. positions: [tokens]; returns two [tokens, pairs] f32."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(rope, rope.dims or head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def growth(scaling: QueryScaling, positions: jax.Array) -> jax.Array:
    """What queries are multiplied by. positions: [tokens] i32; returns [tokens] f32."""
    steps = (positions + scaling.offset) // scaling.length
    return 1.0 + scaling.beta * jnp.log1p(steps.astype(jnp.float32))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    """Radians per position of each pair of dimensions: [head_dim / 2]. head_dim: of those that are turned."""
    base = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return _STRETCH[rope.kind](rope, base, head_dim).astype(np.float32)


def _default(rope: RopeConfig, base: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    return base


def _linear(rope: RopeConfig, base: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    return base / rope.factor


def _llama3(rope: RopeConfig, base: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    """Wavelengths past the trained length / low_freq_factor are divided; a smooth band joins them to the untouched."""
    turns = _trained_length(rope) * base / (2 * math.pi)
    width = rope.high_freq_factor - rope.low_freq_factor
    # A band of no width is a step (Llama 4).
    keep = np.clip((turns - rope.low_freq_factor) / width, 0.0, 1.0) if width else turns > rope.low_freq_factor
    return keep * base + (1 - keep) * base / rope.factor


def _yarn(rope: RopeConfig, base: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    """Peng et al. 2023: pairs that turn under beta_slow times are divided, over beta_fast kept, a ramp between."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(_trained_length(rope) / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high if high != low else high + 0.001  # no division by zero where the ramp is a step
    divide = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return divide * base / rope.factor + (1 - divide) * base


def _longrope(rope: RopeConfig, base: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    return base / np.asarray(rope.long_factors if rope.long else rope.short_factors)


def _trained_length(rope: RopeConfig) -> int:
    if rope.original_max_position is None:
        raise ValueError(f"rope kind '{rope.kind}' needs original_max_position, the length the model was trained at")
    return rope.original_max_position


_STRETCH = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
