"""Qwen2 and Qwen2.5 (biases on q, k and v), and Qwen3 (RMSNorm on q and k); both may mix window and full layers."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, common_fields, layer_windows
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _qwen2(fields: Fields) -> ModelConfig:
    fields.expect("use_mrope", False)
    common = common_fields(fields, _DEFAULTS)
    windows = layer_windows(fields, common["num_layers"])
    return ModelConfig(family="qwen2", **common, windows=windows, qkv_bias=True)


def _qwen3(fields: Fields) -> ModelConfig:
    common = common_fields(fields, {**_DEFAULTS, "head_dim": 128})
    windows = layer_windows(fields, common["num_layers"])
    bias = fields.boolean("attention_bias", False)
    return ModelConfig(family="qwen3", **common, windows=windows, qk_norm=True, qkv_bias=bias, out_bias=bias)


QWEN2 = Family(_qwen2, LLAMA_TABLE)
QWEN3 = Family(_qwen3, LLAMA_TABLE)
