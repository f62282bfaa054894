"""Checks the arguments of moe and grouped_matmul and picks the implementation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.fused_mlp import activations
from pallas_kernels.moe import kernel, xla
from pallas_kernels.moe.config import Weight, weight_shape
from pallas_kernels.target import CPU, Target


def moe(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    *,
    activation: str = "silu",
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """The sum over a token's experts of weight x (activation(x gate + b) (x up + b) down + b), without dropping tokens.

    x: [tokens, embed]; experts: [tokens, top_k] i32, of each token's choices, where an id that is no expert (the number
    of experts, say: padding) adds nothing; weights: [tokens, top_k] f32; gate_up: [experts, embed, 2, mlp], gate before
    up, or a QuantizedArray of it; down: [experts, mlp, embed], or a QuantizedArray of it; activation: as in
    `fused_mlp`; gate_up_bias: [experts, 2, mlp]; down_bias: [experts, embed]. Returns [tokens, embed] in x's dtype.
    Sums are float32; what lies between the projections is in x's dtype. Experts that nobody chose are not read.
    Raises ValueError if shapes disagree and for an unknown activation.
    """
    tokens, embed = x.shape
    num_experts, mlp = _check_weights(gate_up, down, embed)
    choice.check_shape("experts", experts, (tokens, None))
    choice.check_shape("weights", weights, experts.shape)
    if gate_up_bias is not None:
        choice.check_shape("gate_up_bias", gate_up_bias, (num_experts, 2, mlp))
    if down_bias is not None:
        choice.check_shape("down_bias", down_bias, (num_experts, embed))
    if activation not in activations.NAMES:
        raise ValueError(f"there is no activation {activation!r}; there are: {', '.join(activations.NAMES)}")
    obstacle = target.lacks_hopper() if interpret is None else None
    chosen = choice.resolve("moe", implementation, obstacle or kernel.obstacle(x, gate_up, down))
    if not experts.size:
        return jnp.zeros_like(x)
    options: dict[str, Any] = {
        "activation": activation,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    if chosen == "mosaic":
        options |= {"cores": target.cores, "interpret": interpret}
        return kernel.moe(x, experts, weights, gate_up, down, **options)
    return xla.moe(x, experts, weights, gate_up, down, platform=target.platform, **options)


def grouped_matmul(
    x: jax.Array,
    weight: Weight,
    group_sizes: jax.Array,
    *,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """Each group of rows times the weight of its expert.

    x: [rows, inputs], sorted by expert; weight: [experts, inputs, *outputs], or a QuantizedArray of it; group_sizes:
    [experts] i32, rows of each expert, in sum at most `rows`. Returns [rows, *outputs] in x's dtype, zero for the rows
    of no group, which may hold anything. Raises ValueError if shapes disagree.
    """
    num_experts, inputs, *outputs = weight_shape(weight)
    choice.check_shape("x", x, (None, inputs))
    choice.check_shape("group_sizes", group_sizes, (num_experts,))
    obstacle = target.lacks_hopper() if interpret is None else None
    chosen = choice.resolve("grouped_matmul", implementation, obstacle or kernel.obstacle(x, weight))
    if not x.shape[0] * math.prod(outputs):
        return jnp.zeros((x.shape[0], *outputs), x.dtype)
    if chosen == "mosaic":
        return kernel.grouped_matmul(x, weight, group_sizes, cores=target.cores, interpret=interpret)
    return xla.grouped_matmul(x, weight, group_sizes, platform=target.platform)


def _check_weights(gate_up: Weight, down: Weight, embed: int) -> tuple[int, int]:
    """The number of experts and mlp."""
    shape = weight_shape(gate_up)
    if len(shape) != 4 or shape[1:3] != (embed, 2):
        raise ValueError(f"gate_up has shape {shape}; it must be [experts, {embed}, 2, mlp]")
    num_experts, _, _, mlp = shape
    if weight_shape(down) != (num_experts, mlp, embed):
        raise ValueError(f"down has shape {weight_shape(down)}; it must be [{num_experts}, {mlp}, {embed}]")
    return num_experts, mlp
