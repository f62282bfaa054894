"""The MLP in plain JAX: XLA fuses the bias and the activation into one pass over the product."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.fused_mlp.activations import activate


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[M, inputs] · [inputs, *outputs] in x's dtype; float32 is not rounded to TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, weight, (((1,), (0,)), ((), ())), precision=precision)


def gate_up(x: jax.Array, weight: jax.Array, bias: jax.Array | None, activation: str, gated: bool) -> jax.Array:
    """x: [M, K]; weight: [K, 2, mlp], or [K, mlp] if not gated; bias: [2, mlp] or [mlp]. Returns [M, mlp]."""
    flat = weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
    return activated(matmul(x, flat).reshape(x.shape[0], *weight.shape[1:]), bias, activation, gated)


def activated(product: jax.Array, bias: jax.Array | None, activation: str, gated: bool) -> jax.Array:
    """product: [M, 2, mlp], or [M, mlp] if not gated. The activation is computed in float32."""
    wide = product.astype(jnp.float32)
    if bias is not None:
        wide = wide + bias.astype(jnp.float32)
    gate, up = (wide[:, 0], wide[:, 1]) if gated else (wide, None)
    return activate(activation, gate, up).astype(product.dtype)


def down(hidden: jax.Array, weight: jax.Array, residual: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """hidden: [M, mlp]; weight: [mlp, K]; residual: [M, K]; bias: [K]. Returns [M, K]."""
    return added(matmul(hidden, weight), residual, bias)


def added(product: jax.Array, residual: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """product: [M, K], plus what there is to add."""
    for term in (bias, residual):
        if term is not None:
            product = product + term.astype(product.dtype)
    return product
