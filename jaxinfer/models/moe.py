"""The MLP of a layer whose tokens are routed to experts. No token is dropped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.models.layers import Mlp
from jaxinfer.models.norms import enter, leave
from jaxinfer.models.observe import observe
from jaxinfer.parameters import Tree, moe_parameters
from pallas_kernels.fused_mlp import down, gate_up
from pallas_kernels.moe import moe
from pallas_kernels.target import Target

CHOICES = "mlp.experts"
"""What an observer is told the experts of each row by, [rows, experts of each] i32; the rows are those of
`mlp.expert_gate_up`."""


def _moe(
    x: jax.Array,
    delta: jax.Array | None,
    norms: Tree,
    weights: Tree,
    *,
    config: ModelConfig,
    shards: int,
    target: Target,
) -> tuple[jax.Array, jax.Array | None]:
    x, inner = enter(x, delta, norms, config, target)
    biases = {"bias": weights.get("router_bias"), "correction": weights.get("router_correction_bias")}
    experts, shares = route(inner, weights["router"], config, **biases)
    options: dict[str, Any] = {"activation": config.activation, "target": target}
    if config.expert_bias:
        first = jax.lax.axis_index("tensor") == 0  # one device adds it to the sum
        down_bias = weights["expert_down_bias"]
        options["gate_up_bias"] = weights["expert_gate_up_bias"]
        options["down_bias"] = down_bias if shards == 1 else jnp.where(first, down_bias, jnp.zeros_like(down_bias))
    rows = inner
    if config.router_scales_input:  # what each of a token's experts takes is a row of its own
        rows = (inner[:, None] * shares[..., None]).astype(inner.dtype).reshape(-1, inner.shape[1])
        experts = experts.reshape(-1, 1)
        shares = jnp.ones(experts.shape, jnp.float32)
    observe("mlp.expert_gate_up", rows)
    observe(CHOICES, experts)
    out = moe(rows, experts, shares, weights["expert_gate_up"], weights["expert_down"], **options)
    if config.router_scales_input:
        out = out.reshape(len(inner), -1, inner.shape[1]).sum(1)
    if config.shared_expert_size:
        observe("mlp.shared_gate_up", inner)
        hidden = gate_up(inner, weights["shared_gate_up"], activation=config.activation, target=target)
        observe("mlp.shared_down", hidden)
        shared = down(hidden, weights["shared_down"], target=target)
        if config.shared_expert_gate:
            shared = (jax.nn.sigmoid(scores(inner, weights["shared_router"])) * shared).astype(out.dtype)
        out = out + shared
    out = out if shards == 1 else jax.lax.psum(out, "tensor")
    return leave(x, out, norms, config, target)


class Moe(Mlp):
    """Each token's sum over its experts, weighted by the router, and the shared expert.

    Each shard computes its part of every expert's hidden layer.
    """

    parameters = staticmethod(moe_parameters)
    compute = staticmethod(_moe)


def route(
    x: jax.Array,
    router: jax.Array,
    config: ModelConfig,
    *,
    bias: jax.Array | None = None,
    correction: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, [tokens, experts_per_token] i32, and their weights, f32. x: [tokens, embed].

    bias, correction: [experts], to the logits, and to the scores that are chosen by. Equal scores go to the lower
    number, whatever else is in the batch.
    """
    logits = scores(x, router)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    shares = jax.nn.softmax(logits) if config.router_score == "softmax" else jax.nn.sigmoid(logits)
    by = shares if correction is None else shares + correction.astype(jnp.float32)
    if config.router_score == "sigmoid" and correction is None:
        by = logits  # which still differ where their sigmoids round to one
    if config.router_groups:
        by = jnp.where(best_groups(by, config), by, -jnp.inf)
    experts = jax.lax.top_k(by, config.experts_per_token)[1]
    shares = jnp.take_along_axis(shares, experts, axis=-1)
    if config.router_normalise:
        shares = shares / shares.sum(-1, keepdims=True)
    return experts, shares * config.router_scale


def best_groups(by: jax.Array, config: ModelConfig) -> jax.Array:
    """[tokens, experts]: whether an expert is in one of the groups that are chosen from. by: the same shape."""
    groups = by.reshape(by.shape[0], config.router_groups, -1)
    best = jax.lax.top_k(groups, 1 if config.router_group_score == "max" else 2)[0].sum(-1)
    chosen = jax.lax.top_k(best, config.router_top_groups)[1]
    among = (chosen[:, :, None] == jnp.arange(config.router_groups)).any(1)
    return jnp.repeat(among, groups.shape[2], axis=1)


def scores(x: jax.Array, router: jax.Array) -> jax.Array:
    """[tokens, outputs] f32"""
    return jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
