"""How many bytes a model takes, and what fits on a device: arithmetic on the config, no jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer import parameters
from jaxinfer.config import CacheConfig, ModelConfig

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


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    return parameters.count(config) * DTYPE_BYTES[dtype]


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Cache bytes of one token over all layers."""
    return config.kv_elements_per_token() * DTYPE_BYTES[dtype]


def fit(config: ModelConfig, device_gb: int, tensor: int, dtype: str) -> Fit:
    """What one of `tensor` devices of `device_gb` holds, at the default `memory_fraction`.

    Norms count as sharded too, and the step's temporaries are left out: the engine measures them at start-up.
    Raises ValueError if `tensor` does not fit the model's heads.
    """
    physical = parameters.for_tensor_parallel(config, tensor)
    weights = -(-weight_bytes(physical, dtype) // tensor)
    left = int(device_gb * 1e9 * CacheConfig().memory_fraction) - weights
    return Fit(device_gb, tensor, weights, max(0, left * tensor // kv_bytes_per_token(physical, dtype)))
