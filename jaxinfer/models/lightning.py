"""Lightning attention (Qin et al. 2024; MiniMax-01): linear attention whose heads forget, each at its own rate."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import of_this_shard
from jaxinfer.models.layers import linear, summed
from jaxinfer.models.norms import enter, leave
from jaxinfer.models.observe import observe
from jaxinfer.models.recurrent import Recurrent, RecurrentInputs, RecurrentState, recur
from jaxinfer.parameters import Tree

NORM_EPS = 1e-6
"""Of the norm of what is read, whatever that of the others is."""


def _lightning(
    x: jax.Array,
    delta: jax.Array | None,
    norms: Tree,
    weights: Tree,
    state: RecurrentState,
    inputs: RecurrentInputs,
    *,
    config: ModelConfig,
    shards: int,
    layer: int,
) -> tuple[jax.Array, jax.Array | None, RecurrentState]:
    x, inner = enter(x, delta, norms, config, inputs.target)
    observe("attention.qkvz", inner)
    qkvz = linear(inner, weights["qkvz"], target=inputs.target)
    mixed, gate = jnp.split(qkvz, [config.recurrent_channels], axis=-1)
    size = config.recurrent_key_dim
    q, k, v = jnp.split(jax.nn.silu(mixed.astype(jnp.float32)), [size, 2 * size], axis=-1)
    slopes = of_this_shard(decay_slopes(config, layer), shards)  # [heads]
    log_decay = jnp.broadcast_to(-slopes[:, None], (*v.shape[:2], 1))
    out, memory = recur(state.memory, q, k, v[:, :, None], log_decay, None, inputs, x.dtype)
    out = _normalise_heads(out, weights["value_norm"]["scale"], shards)
    out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))[:, :, None]).astype(x.dtype)
    observe("attention.heads_out", out)
    project = functools.partial(linear, out, weights["heads_out"], contract=3, target=inputs.target)
    out = summed(project, None, shards)
    return *leave(x, out, norms, config, inputs.target), RecurrentState(memory, None)


def decay_slopes(config: ModelConfig, layer: int) -> NDArray[np.float32]:
    """[heads]: what each head's memory loses a token, as the exponent: the further down the layer, the less."""
    heads = config.recurrent_value_heads
    share = 1 - layer / (config.num_layers - 1 + 1e-5) + 1e-5
    return (2.0 ** (-8.0 * np.arange(1, heads + 1) / heads) * share).astype(np.float32)


def _normalise_heads(x: jax.Array, scale: jax.Array, shards: int) -> jax.Array:
    """RMSNorm over all heads together. x: [tokens, heads, 1, value_dim] f32, of this shard; scale: the same but tokens.

    The mean over all shards is one small all-reduce more.
    """
    square = jnp.mean(x * x, axis=(1, 2, 3), keepdims=True)
    square = square if shards == 1 else jax.lax.pmean(square, "tensor")
    return x * jax.lax.rsqrt(square + NORM_EPS) * scale.astype(jnp.float32)


class Lightning(Recurrent):
    """In the place of `Attention`; layers forget at different rates."""

    compute = staticmethod(_lightning)

    def __init__(self, config: ModelConfig, layer: int, weights: Tree, mesh: Mesh):
        super().__init__(config, layer, weights, mesh)
        self.layer = layer

    def options(self) -> dict[str, Any]:
        return {"layer": self.layer}
