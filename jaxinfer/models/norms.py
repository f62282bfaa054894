"""Normalisation, and where it stands around the halves of a layer: attention and the MLP."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import ModelConfig
from jaxinfer.models.observe import observing
from jaxinfer.parameters import Tree
from pallas_kernels import norm_matmul
from pallas_kernels.formats import QuantizedRows
from pallas_kernels.quantize_rows import norm_and_quantize_rows
from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.target import Target


class Norm(nnx.Module):
    """The weights of a normalisation: a scale, a bias, either or neither."""

    def __init__(self, config: ModelConfig, weights: Tree):
        self.config = config
        self.names = tuple(weights)
        for name, weight in weights.items():
            setattr(self, name, nnx.Param(weight))

    def weights(self) -> Tree:
        """The arrays, for a half of a layer, which normalises within its shard_map."""
        return {name: getattr(self, name).get_value() for name in self.names}

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [rows, embed], anywhere: in plain JAX."""
        return normalise(x, self.weights(), self.config, None)


def normalise(x: jax.Array, weights: Tree, config: ModelConfig, target: Target | None) -> jax.Array:
    """x: [rows, embed]. RMSNorm or LayerNorm, in float32, rounded once. target: None for plain JAX."""
    if config.norm == "layer":
        return layer_norm(x, weights, config)
    scale = norm_scale(weights, config)
    if target is None:
        return rms_norm(x, scale, eps=config.norm_eps, implementation="xla")
    return rms_norm(x, scale, eps=config.norm_eps, target=target)


def add_and_normalise(
    x: jax.Array, delta: jax.Array | None, weights: Tree, config: ModelConfig, target: Target
) -> tuple[jax.Array, jax.Array]:
    """x + delta, and its norm. A half of a layer leaves its sum to the next norm: together they are one kernel."""
    if delta is not None and config.norm == "rms":
        return add_rms_norm(x, delta, norm_scale(weights, config), eps=config.norm_eps, target=target)
    x = add(x, delta)
    return x, normalise(x, weights, config, target)


def layer_norm(x: jax.Array, weights: Tree, config: ModelConfig) -> jax.Array:
    """Over the last dimension (Ba et al. 2016). The weights, where there are any, are broadcast to x."""
    wide = x.astype(jnp.float32)
    wide -= wide.mean(-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_eps)
    if "scale" in weights:
        wide *= weights["scale"].astype(jnp.float32) + config.norm_offset
    if "bias" in weights:
        wide += weights["bias"].astype(jnp.float32)
    return wide.astype(x.dtype)


def enter(
    x: jax.Array, delta: jax.Array | None, norms: Tree, config: ModelConfig, target: Target, into: Any = None
) -> tuple[jax.Array, Any]:
    """What a half of a layer adds to, x + delta as a rule, and what it takes of it: an array, or, if `into` rounds
    activations and a norm comes before it that can, QuantizedRows.

    norms: `norm` and `output_norm`, as far as `norm_placement` has them. into: the weight, or one of those alike, that
    all of what is taken goes into; None: other things, too.
    """
    inner: jax.Array | QuantizedRows
    before = config.norm_placement in ("pre", "sandwich")
    if before and config.norm == "rms" and getattr(into, "round_activations", False):
        scale = norm_scale(norms["norm"], config)
        x, inner = norm_and_quantize_rows(x, delta, scale, eps=config.norm_eps, format=into.format, target=target)
    elif before or config.norm_placement == "entry":
        x, inner = add_and_normalise(x, delta, norms["norm"], config, target)
        x = inner if config.norm_placement == "entry" else x
    else:
        x = inner = add(x, delta)
    if config.skip_scale != 1.0:
        x = x * jnp.asarray(config.skip_scale, x.dtype)
    return x, inner


def folded(
    delta: jax.Array | None, norms: Tree, config: ModelConfig, target: Target, into: Any
) -> norm_matmul.Norm | None:
    """In place of `enter`: the norm that the kernel of the projection behind it may compute itself, of x and delta.

    into: as in `enter`. None where the norm stands elsewhere, or its result is wanted besides.
    """
    if not target.untimed or into is None or getattr(into, "round_activations", False) or observing():
        return None
    if config.norm != "rms" or config.norm_placement not in ("pre", "sandwich") or config.skip_scale != 1.0:
        return None
    return norm_matmul.Norm(norm_scale(norms["norm"], config), delta, config.norm_eps)


def leave(
    x: jax.Array, out: jax.Array, norms: Tree, config: ModelConfig, target: Target
) -> tuple[jax.Array, jax.Array | None]:
    """x, and what is still to be added to it, from what a half of a layer gave."""
    if "output_norm" in norms:
        out = normalise(out, norms["output_norm"], config, target)
    if config.residual_scale != 1.0:
        out = out * jnp.asarray(config.residual_scale, out.dtype)
    if config.norm_placement == "post":
        return normalise(x + out, norms["norm"], config, target), None
    return x, out


def add(x: jax.Array, delta: jax.Array | None) -> jax.Array:
    return x if delta is None else x + delta


def norm_scale(weights: Tree, config: ModelConfig) -> jax.Array:
    """What the normalised is multiplied by, where there is a scale."""
    scale = weights["scale"]
    return scale if config.norm_offset == 0.0 else scale.astype(jnp.float32) + config.norm_offset


def normalise_heads(
    qkv: jax.Array, q_scale: jax.Array, k_scale: jax.Array, config: ModelConfig, shards: int
) -> jax.Array:
    """qkv with queries and keys normalised in a way that `cache_append` does not know.

    qkv: [tokens, kv_heads, q_per_kv + 2, head_dim], of this shard; q_scale, k_scale: as `parameters` declares them.
    """
    wide = qkv.astype(jnp.float32)
    queries, keys, values = wide[:, :, :-2], wide[:, :, -2:-1], wide[:, :, -1:]
    k_scale = k_scale if k_scale.ndim == 1 else k_scale[:, None]
    parts = [_normalise(x, scale, config, shards) for x, scale in ((queries, q_scale), (keys, k_scale))]
    return jnp.concatenate([*parts, values], axis=2).astype(qkv.dtype)


def _normalise(x: jax.Array, scale: jax.Array, config: ModelConfig, shards: int) -> jax.Array:
    """x: [tokens, kv_heads, heads, head_dim] f32."""
    if config.norm == "layer":
        return layer_norm(x, {"scale": scale}, config)
    axes = (1, 2, 3) if config.qk_norm_span == "all_heads" else 3
    square = jnp.mean(x * x, axis=axes, keepdims=True)
    if config.qk_norm_span == "all_heads" and shards > 1:  # replicated kv heads are so alike on every device
        square = jax.lax.pmean(square, "tensor")
    return x * jax.lax.rsqrt(square + config.norm_eps) * norm_scale({"scale": scale}, config)
