"""moe on Hopper: a plan of the rows, then two grouped matmuls by whichever kernel suits the rows an expert has."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.formats import QuantizedArray
from pallas_kernels.moe.config import DEPTH, LANES, Config, DecodeConfig
from pallas_kernels.moe.kernel_decode import decode_rows
from pallas_kernels.moe.kernel_prefill import prefill_rows
from pallas_kernels.moe.plan import Plan

DTYPES = ("bfloat16", "float16")


def obstacle(x: jax.Array, *weights: jax.Array | QuantizedArray) -> str | None:
    """Why the kernels do not take these weights [experts, inputs, *outputs]; None if they do."""
    for weight in weights:
        if isinstance(weight, QuantizedArray):
            return f"it does not read {weight.format} weights"
        if x.dtype.name not in DTYPES or weight.dtype != x.dtype:
            wanted = " or ".join(DTYPES)
            return f"it multiplies {wanted} of one dtype, and has {x.dtype.name} x {weight.dtype.name}"
        inputs, width = weight.shape[1], weight.shape[-1]  # gate and up are two of these
        if inputs % DEPTH or width % LANES:
            return f"it needs dimensions that {DEPTH} divides, and has {inputs} and {width}"
    return None


def rows(
    x: jax.Array,
    weight: jax.Array | QuantizedArray,
    bias: jax.Array | None,
    plan: Plan,
    config: Config,
    *,
    activation: str | None,
    interpret: Any = None,
) -> jax.Array:
    """x: [rows, inputs], laid out as the plan says; weight: [experts, inputs, *outputs], with an activation outputs are
    [2, width]; bias: [experts, *outputs] or None. Returns [splits, rows, width], to be summed.
    """
    assert not isinstance(weight, QuantizedArray), "there is an obstacle"
    weight = weight.reshape(*weight.shape[:2], -1)
    bias = None if bias is None else bias.reshape(bias.shape[0], -1)
    if isinstance(config, DecodeConfig):
        return decode_rows(x, weight, bias, plan, config, activation=activation, interpret=interpret)
    return prefill_rows(x, weight, bias, plan, config, activation=activation, interpret=interpret)[None]
