"""Granite: Llama with multipliers on embedding, residual, attention and logits."""

from __future__ import annotations

from typing import Any

from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def multipliers(fields: Fields) -> dict[str, Any]:
    """The fields of ModelConfig that Granite's own fields set."""
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
    }


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        family="granite",
        **common_fields(fields, DEFAULTS),
        **multipliers(fields),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


GRANITE = Family(_config, LLAMA_TABLE)
