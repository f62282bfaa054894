"""Llama 1 to 3.3, SmolLM and whatever else calls itself `llama`."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(fields: Fields) -> ModelConfig:
    attention_bias = fields.boolean("attention_bias", False)
    fields.expect("pretraining_tp", 1, None)
    fields.expect("rope_interleaved", False)
    fields.expect("sliding_window", None)
    fields.ignore(["is_llama_config", "max_sequence_length"])
    return ModelConfig(
        family="llama",
        **common_fields(fields, _DEFAULTS),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


LLAMA = Family(_config, LLAMA_TABLE)
