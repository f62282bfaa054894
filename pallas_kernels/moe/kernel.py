"""moe on Hopper: a plan of the rows, then two grouped matmuls by whichever kernel suits the rows an expert has."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedArray
from pallas_kernels.moe.config import (
    DEPTH,
    LANES,
    MOST_SCALES,
    Weight,
    decode,
    least_depth,
    prefill,
    row_tile,
    suits_prefill,
    weight_shape,
)
from pallas_kernels.moe.kernel_decode import decode_rows
from pallas_kernels.moe.kernel_prefill import prefill_rows
from pallas_kernels.moe.kernel_quant import quant_rows
from pallas_kernels.moe.plan import Plan, in_order, plan, plan_sorted, weighted_sum

DTYPES = ("bfloat16", "float16")


def obstacle(x: jax.Array, *weights: Weight) -> str | None:
    """Why the kernels do not take these weights [experts, inputs, *outputs]; None if they do."""
    for weight in weights:
        if x.dtype.name not in DTYPES:
            return f"it multiplies {' or '.join(DTYPES)}, and x is {x.dtype.name}"
        if isinstance(weight, QuantizedArray):
            inputs, width, depth = weight.inputs, weight.outputs[-1], least_depth(weight)
        else:
            inputs, width, depth = weight.shape[1], weight.shape[-1], DEPTH
            if weight.dtype != x.dtype:
                return f"it multiplies {x.dtype.name} by itself or by 8 and 4 bits, not by {weight.dtype.name}"
        if inputs % depth or width % LANES:
            return f"it needs inputs that {depth} divides and outputs that {LANES} divides, not {inputs} and {width}"
    return None


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
    cores: int,
    interpret: Any = None,
) -> jax.Array:
    """Shapes as in `api.moe`. cores: of the GPU."""
    (tokens, top_k), (num_experts, _, _, mlp) = experts.shape, weight_shape(gate_up)
    choices = tokens * top_k
    layout = plan(experts.reshape(-1), num_experts, row_tile(choices, num_experts, gate_up, down))
    many = suits_prefill(choices, num_experts, gate_up, down)
    options: dict[str, Any] = {"choices": choices, "many": many, "cores": cores, "interpret": interpret}
    hidden = _rows(x[layout.sources // top_k], gate_up, gate_up_bias, layout, mlp, activation=activation, **options)
    rows = _rows(hidden[0], down, None, layout, x.shape[1], activation=None, **options)
    return weighted_sum(rows, layout, experts, weights, down_bias).astype(x.dtype)


def grouped_matmul(
    x: jax.Array, weight: Weight, group_sizes: jax.Array, *, cores: int, interpret: Any = None
) -> jax.Array:
    """Shapes as in `api.grouped_matmul`."""
    choices, (num_experts, _, *outputs) = x.shape[0], weight_shape(weight)
    layout = plan_sorted(group_sizes, choices, row_tile(choices, num_experts, weight))
    many = suits_prefill(choices, num_experts, weight)
    options: dict[str, Any] = {"choices": choices, "many": many, "cores": cores, "interpret": interpret}
    rows = _rows(x[layout.sources], weight, None, layout, math.prod(outputs), activation=None, **options)
    return in_order(rows, layout, x.dtype).reshape(-1, *outputs)


def _rows(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None,
    layout: Plan,
    width: int,
    *,
    activation: str | None,
    choices: int,
    many: bool,
    cores: int,
    interpret: Any,
) -> jax.Array:
    """x: [rows, inputs], laid out as the plan says; weight: [experts, inputs, *outputs], with an activation outputs are
    [2, width]; bias: [experts, *outputs] or None. Returns [splits, rows, width], to be summed.
    """
    bias = None if bias is None else bias.reshape(bias.shape[0], -1)
    flat = _flat(weight) if isinstance(weight, QuantizedArray) else weight.reshape(*weight.shape[:2], -1)
    options: dict[str, Any] = {"activation": activation, "interpret": interpret}
    sizes: dict[str, Any] = {"gated": activation is not None, "cores": cores}
    if many and not isinstance(flat, QuantizedArray):
        return prefill_rows(x, flat, bias, layout, prefill(width, x.dtype, **sizes), **options)[None]
    config = decode(layout.tile, choices, flat, x.shape[1], width, x.dtype, **sizes)
    if isinstance(flat, QuantizedArray):
        return quant_rows(x, flat, bias, layout, config, **options)
    return decode_rows(x, flat, bias, layout, config, **options)


def _flat(weight: QuantizedArray) -> QuantizedArray:
    """The same weight with its outputs in one dimension after the experts, and as many scales as are loaded at once."""
    inner = 0 if weight.group_size is None else 1

    def flatten(array: jax.Array, inner: int) -> jax.Array:
        return array.reshape(array.shape[0], -1, *array.shape[array.ndim - inner :])

    def flatten_scales(array: jax.Array) -> jax.Array:
        flat = flatten(array, inner)
        missing = MOST_SCALES - flat.shape[-1] if inner else 0
        return jnp.pad(flat, ((0, 0), (0, 0), (0, missing))) if missing > 0 else flat

    return dataclasses.replace(
        weight,
        values=flatten(weight.values, 1),
        scales=flatten_scales(weight.scales),
        zeros=None if weight.zeros is None else flatten_scales(weight.zeros),
    )
