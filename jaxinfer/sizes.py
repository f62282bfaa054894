"""How many bytes a model takes, and what fits on a device: arithmetic on the config, no jax."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxinfer import parameters
from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, Quantization

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEVICE_GB = (24, 80, 141)
"""Memory of common devices in 10**9 bytes: RTX 4090 and L4, A100 and H100, H200."""


@dataclass(frozen=True)
class Fit:
    """One size of device, one number of them."""

    device_gb: int
    tensor_parallel_size: int
    weight_bytes: int
    """Weights on each device."""
    cache_tokens: int
    """Tokens of KV cache that fit beside them; 0 if the weights alone do not fit."""


def weight_bytes(config: ModelConfig, dtype: str, quantization: Quantization | None = None) -> int:
    """dtype: of what is not quantized; quantization: resolved."""
    each = (parameter for _, parameter in parameters.flatten(parameters.declare(config)))
    return sum(_stored_bytes(parameter, DTYPE_BYTES[dtype], quantization) for parameter in each)


def _stored_bytes(parameter: parameters.Parameter, itemsize: int, quantization: Quantization | None) -> int:
    """itemsize: of the model's dtype, which scales of groups have too."""
    if quantization is None or not parameters.is_stored_in(parameter, quantization):
        return math.prod(parameter.shape) * itemsize
    *outputs, inputs = parameter.stored_shape
    if quantization.format == "mxfp4":
        return math.prod(outputs) * (inputs // 2 + inputs // 32)
    if quantization.group_size is None:
        return math.prod(outputs) * (inputs + 4)
    per_group = itemsize if quantization.symmetric else 2 * itemsize
    return math.prod(outputs) * (inputs // 2 + inputs // quantization.group_size * per_group)


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Cache bytes of one token over all layers."""
    return config.kv_elements_per_token() * DTYPE_BYTES[dtype]


def fit(config: ModelConfig, device_gb: int, tensor: int, dtype: str, quantization: Quantization | None = None) -> Fit:
    """What one of `tensor` devices of `device_gb` holds, at the default `memory_fraction`.

    Norms count as sharded too, and the step's temporaries are left out: the engine measures them at start-up. Recurrent
    layers have a state for each of the default `max_num_seqs`.
    Raises ValueError if `tensor` does not fit the model's heads.
    """
    physical = parameters.for_tensor_parallel(config, tensor)
    weights = -(-weight_bytes(physical, dtype, quantization) // tensor)
    states = -(-physical.state_bytes * EngineConfig.max_num_seqs // tensor)
    left = int(device_gb * 1e9 * CacheConfig().memory_fraction) - weights - states
    return Fit(device_gb, tensor, weights, max(0, left * tensor // kv_bytes_per_token(physical, dtype)))
