"""Nemotron: LayerNorm whose stored scale is one less, squared ReLU in a plain MLP, partial RoPE."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def _config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    common = common_fields(fields, _DEFAULTS, {"norm_eps": "norm_eps"})
    fields.expect("kv_channels", common["head_dim"])  # again
    return ModelConfig(
        family="nemotron",
        **common,
        norm="layer",
        norm_bias=True,
        norm_offset=1.0,
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


NEMOTRON = Family(_config, LLAMA_TABLE)
