"""ERNIE 4.5: Llama whose RoPE turns neighbouring dimensions."""

from __future__ import annotations

from convert.families.decoder import common_fields
from convert.families.fields import Fields
from convert.families.glm import INTERLEAVED_TABLE
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("use_bias", False)
    return ModelConfig(
        family="ernie4_5", **common_fields(fields, _DEFAULTS), qkv_bias=bias, out_bias=bias, mlp_bias=bias
    )


ERNIE4_5 = Family(_config, INTERLEAVED_TABLE)
