"""What the MLP computes: float32 throughout, nothing fused. Independent of the other versions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedArray, dequantize

FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def wide(weight: jax.Array | QuantizedArray) -> jax.Array:
    """[inputs, *outputs] float32."""
    if isinstance(weight, QuantizedArray):
        return jnp.moveaxis(dequantize(weight, jnp.float32), -1, 0)
    return weight.astype(jnp.float32)


def product(x: jax.Array, weight: Any, bias: jax.Array | None) -> jax.Array:
    out = jnp.tensordot(x.astype(jnp.float32), wide(weight), axes=1, precision=jax.lax.Precision.HIGHEST)
    return out if bias is None else out + bias.astype(jnp.float32)


def gate_up(
    x: jax.Array, weight: Any, bias: jax.Array | None = None, *, activation: str = "silu", gated: bool = True
) -> jax.Array:
    """x: [M, K]; weight: [K, 2, mlp], or [K, mlp] if not gated. Returns [M, mlp] float32."""
    out = product(x, weight, bias)
    if not gated:
        return FUNCTIONS[activation](out)
    gate, up = out[:, 0], out[:, 1]
    if activation == "clamped_silu":
        gate, up = jnp.clip(gate, max=7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)
    return FUNCTIONS[activation](gate) * up


def down(hidden: jax.Array, weight: Any, residual: jax.Array | None = None, bias: jax.Array | None = None) -> jax.Array:
    """hidden: [M, mlp]; weight: [mlp, K]. Returns [M, K] float32."""
    out = product(hidden, weight, bias)
    return out if residual is None else out + residual.astype(jnp.float32)
