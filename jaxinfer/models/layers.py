"""Building blocks: projections, RMSNorm, the gated MLP, the vocabulary's two ends."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Tree

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, contract: int = 1) -> jax.Array:
    """The last `contract` dimensions of x against the first of weight: [tokens, *inputs] · [*inputs, *outputs].

    Every projection goes through here. float32 stays float32 on hardware that would rather round it to TF32.
    """
    inputs = math.prod(weight.shape[:contract])
    x, flat = x.reshape(-1, inputs), weight.reshape(inputs, *weight.shape[contract:])
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jax.lax.dot_general(x, flat, (((1,), (0,)), ((), ())), precision=precision)
    return out if bias is None else out + bias


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last dimension, in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, eps: float, weights: Tree):
        self.eps = eps
        self.scale = nnx.Param(weights["scale"])

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) · up(x)); gate and up are one projection."""

    def __init__(self, config: ModelConfig, weights: Tree):
        self.activation = config.activation
        self.gate_up = nnx.Param(weights["gate_up"])
        self.down = nnx.Param(weights["down"])
        self.gate_up_bias = nnx.Param(weights["gate_up_bias"]) if config.mlp_bias else None
        self.down_bias = nnx.Param(weights["down_bias"]) if config.mlp_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = linear(x, self.gate_up[...], value(self.gate_up_bias))  # [tokens, 2, mlp]
        hidden = ACTIVATIONS[self.activation](gate_up[:, 0]) * gate_up[:, 1]
        return linear(hidden, self.down[...], value(self.down_bias))


class Embedding(nnx.Module):
    """Token ids to vectors, and, where the head is tied, vectors to logits."""

    def __init__(self, weights: Tree):
        self.weight = nnx.Param(weights["weight"])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...].at[tokens].get(mode="promise_in_bounds")

    def logits(self, x: jax.Array) -> jax.Array:
        """x: [rows, embed]; returns [rows, vocab] float32."""
        rows = x.shape[0]
        # XLA's CPU code takes one row against a [vocab, embed] table on one core, two rows on all of them.
        x = jnp.broadcast_to(x, (2, x.shape[1])) if rows == 1 else x
        return _logits(x, self.weight[...], vocab_axis=0)[:rows]


class Head(nnx.Module):
    """The output projection of an untied model: [embed, vocab]."""

    def __init__(self, weights: Tree):
        self.weight = nnx.Param(weights["weight"])

    def logits(self, x: jax.Array) -> jax.Array:
        """x: [rows, embed]; returns [rows, vocab] float32."""
        return _logits(x, self.weight[...], vocab_axis=1)


def _logits(x: jax.Array, table: jax.Array, vocab_axis: int) -> jax.Array:
    contract = (((1,), (1 - vocab_axis,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, table, contract, precision=precision, preferred_element_type=jnp.float32)


def value(parameter: nnx.Param | None) -> jax.Array | None:
    """The array of a parameter that some models lack."""
    return None if parameter is None else parameter[...]
