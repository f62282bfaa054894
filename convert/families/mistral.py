"""Mistral: Llama without biases, all layers looking back `sliding_window` tokens unless it is null."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS)
    window = fields.get("sliding_window", 4096)
    windows = () if window is None else (fields.integer("sliding_window", window),) * common["num_layers"]
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    return ModelConfig(family="mistral", **common, windows=windows)


MISTRAL = Family(_config, LLAMA_TABLE)
