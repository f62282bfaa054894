"""moe in plain JAX: a loop over tiles of rows of one expert, whose weights are read, or dequantized, for the tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedArray, dequantize
from pallas_kernels.fused_mlp.activations import activate
from pallas_kernels.moe.config import Weight, weight_shape, xla_tile
from pallas_kernels.moe.plan import Plan, in_order, plan, plan_sorted, weighted_sum

type Expert = jax.Array


def dot(x: jax.Array, weight: Weight, expert: Expert) -> jax.Array:
    """[rows, inputs] x the weight [inputs, *outputs] of one expert: [rows, product of outputs] f32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    one = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), weight)
    if isinstance(one, QuantizedArray):
        one = dequantize(one, x.dtype)
        one, contract = one.reshape(-1, one.shape[-1]), 1
    else:
        one, contract = one.reshape(one.shape[0], -1), 0
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(x, one, dims, precision=precision, preferred_element_type=jnp.float32)


def for_tiles(
    x: jax.Array, plan: Plan, width: int, dtype: Any, compute: Callable[[jax.Array, Expert], jax.Array], dynamic: bool
) -> jax.Array:
    """[rows, width] in `dtype`: compute([tile, inputs], expert) of each live tile; the other rows are zero.

    x: [rows, inputs]; dynamic: stop after the last live tile. A loop of a length that depends on data makes a GPU wait
    for the host in every turn: there it goes through all tiles.
    """

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(x, i * plan.tile, plan.tile)
        tile = compute(rows, plan.tile_experts[i]).astype(dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, tile, i * plan.tile, axis=0)

    out = jnp.zeros((plan.rows, width), dtype)
    return jax.lax.fori_loop(0, plan.live[0] if dynamic else plan.tiles, body, out)


def moe(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    *,
    activation: str,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    platform: str,
) -> jax.Array:
    """Shapes as in `api.moe`. A tile goes through both projections, so what lies between is as small as a tile."""
    (tokens, top_k), num_experts = experts.shape, weight_shape(gate_up)[0]
    layout = plan(experts.reshape(-1), num_experts, xla_tile(tokens * top_k, num_experts, platform))

    def compute(rows: jax.Array, expert: Expert) -> jax.Array:
        both = dot(rows, gate_up, expert).reshape(layout.tile, 2, -1)
        if gate_up_bias is not None:
            both = both + gate_up_bias[expert].astype(jnp.float32)
        hidden = activate(activation, both[:, 0], both[:, 1]).astype(x.dtype)
        return dot(hidden, down, expert)

    rows = for_tiles(x[layout.sources // top_k], layout, x.shape[1], jnp.float32, compute, platform == "cpu")
    return weighted_sum(rows[None], layout, experts, weights, down_bias).astype(x.dtype)


def grouped_matmul(x: jax.Array, weight: Weight, group_sizes: jax.Array, *, platform: str) -> jax.Array:
    """Shapes as in `api.grouped_matmul`."""
    num_experts, _, *outputs = weight_shape(weight)
    layout = plan_sorted(group_sizes, x.shape[0], xla_tile(x.shape[0], num_experts, platform))
    compute = lambda rows, expert: dot(rows, weight, expert)  # noqa: E731
    rows = for_tiles(x[layout.sources], layout, math.prod(outputs), x.dtype, compute, platform == "cpu")
    return in_order(rows[None], layout, x.dtype).reshape(-1, *outputs)
