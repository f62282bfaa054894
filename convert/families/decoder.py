"""What the llama-like families share: common config fields and the common table of tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert import transforms
from convert.families.fields import Fields, token_ids
from convert.families.rope import rope_config
from convert.families.table import Source, Table

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's `hidden_act` → ours."""

LLAMA_TABLE: Table = {
    "embed.weight": Source(("model.embed_tokens.weight",), transforms.whole),
    "layers.{}.attention_norm.scale": Source(("model.layers.{}.input_layernorm.weight",), transforms.whole),
    "layers.{}.attention.qkv": Source(
        tuple(f"model.layers.{{}}.self_attn.{name}_proj.weight" for name in "qkv"), transforms.fused_qkv
    ),
    "layers.{}.attention.qkv_bias": Source(
        tuple(f"model.layers.{{}}.self_attn.{name}_proj.bias" for name in "qkv"), transforms.fused_qkv_bias
    ),
    "layers.{}.attention.q_norm.scale": Source(("model.layers.{}.self_attn.q_norm.weight",), transforms.whole),
    "layers.{}.attention.k_norm.scale": Source(("model.layers.{}.self_attn.k_norm.weight",), transforms.whole),
    "layers.{}.attention.out": Source(("model.layers.{}.self_attn.o_proj.weight",), transforms.attention_out),
    "layers.{}.attention.out_bias": Source(("model.layers.{}.self_attn.o_proj.bias",), transforms.whole),
    "layers.{}.mlp_norm.scale": Source(("model.layers.{}.post_attention_layernorm.weight",), transforms.whole),
    "layers.{}.mlp.gate_up": Source(
        ("model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"), transforms.fused_gate_up
    ),
    "layers.{}.mlp.gate_up_bias": Source(
        ("model.layers.{}.mlp.gate_proj.bias", "model.layers.{}.mlp.up_proj.bias"), transforms.fused_gate_up_bias
    ),
    "layers.{}.mlp.down": Source(("model.layers.{}.mlp.down_proj.weight",), transforms.transposed),
    "layers.{}.mlp.down_bias": Source(("model.layers.{}.mlp.down_proj.bias",), transforms.whole),
    "final_norm.scale": Source(("model.norm.weight",), transforms.whole),
    "head.weight": Source(("lm_head.weight",), transforms.transposed),
}


def common_fields(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The ModelConfig arguments that every decoder has; `defaults` are those of its transformers config class."""
    hidden_size = fields.integer("hidden_size", defaults["hidden_size"])
    num_heads = fields.integer("num_attention_heads", defaults["num_attention_heads"])
    max_position = fields.integer("max_position_embeddings", defaults["max_position_embeddings"])
    kv_heads = fields.get("num_key_value_heads", defaults["num_key_value_heads"])
    act = fields.get("hidden_act", "silu")
    bos = token_ids(fields, "bos_token_id", defaults["bos_token_id"])
    return {
        "vocab_size": fields.integer("vocab_size", defaults["vocab_size"]),
        "hidden_size": hidden_size,
        "num_layers": fields.integer("num_hidden_layers", defaults["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": num_heads if kv_heads is None else fields.integer("num_key_value_heads", kv_heads),
        "head_dim": _head_dim(fields, hidden_size, num_heads, defaults["head_dim"]),
        "mlp_size": fields.integer("intermediate_size", defaults["intermediate_size"]),
        "max_position": max_position,
        "rope": rope_config(fields, max_position),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": fields.choice("hidden_act", act, ACTIVATIONS),
        "tied_head": fields.boolean("tie_word_embeddings", False),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": token_ids(fields, "eos_token_id", defaults["eos_token_id"]),
    }


def layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Per-layer windows of the Qwen families: `layer_types` if given, else all layers from `max_window_layers` on."""
    used = fields.boolean("use_sliding_window", False)
    window = fields.get("sliding_window", 4096)
    window = fields.integer("sliding_window", window) if used and window is not None else None
    first = fields.get("max_window_layers", 28)
    kinds = fields.get("layer_types")
    if kinds is None:
        sliding = [window is not None and layer >= first for layer in range(num_layers)]
    else:
        sliding = [fields.choice("layer_types", kind, _LAYER_KINDS) for kind in kinds]
    if any(sliding) and window is None:
        raise ValueError(
            f"{fields.where}: 'layer_types' has sliding layers, but 'use_sliding_window' or 'sliding_window' says none"
        )
    return tuple(window if layer else None for layer in sliding) if any(sliding) else ()


_LAYER_KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}


def _head_dim(fields: Fields, hidden_size: int, num_heads: int, default: int | None) -> int:
    head_dim = fields.get("head_dim", default)
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"{fields.where}: 'hidden_size' {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = hidden_size // num_heads if head_dim is None else fields.integer("head_dim", head_dim)
    if head_dim % 2:
        raise ValueError(f"{fields.where}: head_dim is {head_dim}; RoPE turns pairs, so it must be even")
    return head_dim
