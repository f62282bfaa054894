"""What moe and grouped_matmul mean: numpy, float32, one token and one expert at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ids = NDArray[np.int32]


def activation_of(name: str, gate: Array, up: Array) -> Array:
    """gate, up: [mlp]."""
    sigmoid = lambda x: 1.0 / (1.0 + np.exp(-x))  # noqa: E731
    if name == "clamped_silu":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return gate * sigmoid(1.702 * gate) * (up + 1.0)
    functions = {
        "silu": lambda x: x * sigmoid(x),
        "gelu": lambda x: x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))),
        "gelu_tanh": lambda x: x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
        "relu": lambda x: np.maximum(x, 0.0),
        "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    }
    return functions[name](gate) * up


def moe(
    x: Array,
    experts: Ids,
    weights: Array,
    gate_up: Array,
    down: Array,
    *,
    activation: str = "silu",
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
) -> Array:
    """Shapes as in `api.moe`; weights in float32, not quantized."""
    out = np.zeros_like(x)
    for t in range(x.shape[0]):
        for expert, weight in zip(experts[t], weights[t], strict=True):
            if not 0 <= expert < gate_up.shape[0]:
                continue
            both = np.tensordot(x[t], gate_up[expert], axes=1)
            if gate_up_bias is not None:
                both = both + gate_up_bias[expert]
            row = activation_of(activation, both[0], both[1]) @ down[expert]
            if down_bias is not None:
                row = row + down_bias[expert]
            out[t] += weight * row
    return out


def grouped_matmul(x: Array, weight: Array, group_sizes: Ids) -> Array:
    """Shapes as in `api.grouped_matmul`."""
    out = np.zeros((x.shape[0], *weight.shape[2:]), np.float32)
    start = 0
    for expert, size in enumerate(group_sizes):
        out[start : start + size] = np.tensordot(x[start : start + size], weight[expert], axes=1)
        start += size
    return out
