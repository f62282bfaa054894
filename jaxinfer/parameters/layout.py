"""Shapes that a mesh runs: kv heads replicated where there are too few, the vocabulary padded."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.parameters.stored import is_quantized, parts_of


def for_tensor_parallel(config: ModelConfig, tensor: int) -> ModelConfig:
    """The same model in shapes that `tensor` shards divide: kv heads replicated where too few, vocabulary padded.

    Raises ValueError, naming the sizes that fit, if the heads or the MLP do not divide.
    """
    c = config
    if c.vocab_padding:
        raise ValueError("the config is already laid out for a mesh; start from the canonical one")
    if tensor not in fitting_tensor_sizes(c):
        fitting = ", ".join(map(str, fitting_tensor_sizes(c)))
        raise ValueError(
            f"tensor_parallel_size {tensor} does not fit {c.num_heads} query heads, {c.num_kv_heads} kv heads"
            f"{f', {c.recurrent_key_heads} key heads of recurrent layers' if c.recurrent_layers else ''} and an MLP of "
            f"{', '.join(map(str, mlp_sizes(c)))}; sizes that fit: {fitting}"
        )
    return dataclasses.replace(c, num_kv_heads=max(c.num_kv_heads, tensor), vocab_padding=-c.vocab_size % tensor)


def fitting_tensor_sizes(config: ModelConfig) -> list[int]:
    """Sizes that divide the kv heads, or are a multiple of them that divides the query heads; and divide the MLP."""
    c = config
    return [
        size
        for size in range(1, c.num_heads + 1)
        if (c.num_kv_heads % size == 0 or (size % c.num_kv_heads == 0 and c.num_heads % size == 0))
        and all(whole % size == 0 for whole in (*mlp_sizes(c), c.recurrent_key_heads))
    ]


def mlp_sizes(c: ModelConfig) -> list[int]:
    """Hidden sizes that a mesh divides: of MLPs, of one expert, of the shared one, of the MLP beside them; as far as
    the model has them."""
    routed = [size for size in (c.expert_size, c.shared_expert_size, c.dense_residual_size) if size]
    return routed if c.num_experts and not c.dense_layers else [c.mlp_size, *routed]


def to_physical(path: str, weight: Any, config: ModelConfig, physical: ModelConfig) -> Any:
    """A canonical weight in the shape that `physical`, from `for_tensor_parallel`, declares.

    weight: an array (numpy or jax), or a QuantizedArray. Only methods and slices are used, so that it also traces under
    jit, where the result can be sharded.
    """
    if is_quantized(weight):  # [*outputs, inputs]
        parts = {name: _lay_out(path, part, 0, config, physical) for name, part in parts_of(weight).items()}
        return dataclasses.replace(weight, **parts)
    per_head_norm = config.qk_norm_span != "head"
    if path.endswith((".out", ".sinks")) or (path.endswith(".q_norm.scale") and per_head_norm):
        # The query heads of a kv head, split over its copies: the order does not change.
        return weight.reshape(physical.num_kv_heads, physical.q_per_kv, *weight.shape[2:])
    if path.endswith(".k_norm.scale") and per_head_norm:
        return weight.__array_namespace__().repeat(weight, physical.num_kv_heads // config.num_kv_heads, axis=0)
    return _lay_out(path, weight, 1 if path.endswith((".qkv", "head.weight")) else 0, config, physical)


def _lay_out(path: str, array: Any, axis: int, config: ModelConfig, physical: ModelConfig) -> Any:
    """axis: that of the vocabulary, or of the kv heads, whose query heads, key, value and gates follow."""
    xp, leaf = array.__array_namespace__(), path.rpartition(".")[2]
    if path in ("embed.weight", "head.weight", "head.bias") and physical.vocab_padding:
        widths = [(0, physical.vocab_padding if dim == axis else 0) for dim in range(array.ndim)]
        return xp.pad(array, widths)
    copies = physical.num_kv_heads // config.num_kv_heads
    if copies == 1 or leaf not in ("qkv", "qkv_bias"):
        return array
    lead, after, skip = array.shape[:axis], array.shape[axis + 2 :], (slice(None),) * (axis + 1)
    queries = config.q_per_kv
    keys_values = xp.repeat(array[*skip, queries : queries + 2], copies, axis=axis)
    per_query = [array[*skip, :queries], array[*skip, queries + 2 :]]
    split = [part.reshape(*lead, physical.num_kv_heads, -1, *after) for part in per_query if part.shape[axis + 1]]
    return xp.concatenate([split[0], keys_values, *split[1:]], axis=axis + 1)
