"""StableLM: Llama with LayerNorm and partial RoPE."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.table import Family, Source
from convert.joined import each_head
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _config(fields: Fields) -> ModelConfig:
    parallel = fields.boolean("use_parallel_residual", False)
    return ModelConfig(
        family="stablelm",
        **common_fields(fields, _DEFAULTS, {"norm_eps": "layer_norm_eps"}),
        norm="layer",
        norm_bias=True,
        qkv_bias=fields.boolean("use_qkv_bias", False),
        qk_norm=fields.boolean("qk_layernorm", False),
        qk_norm_span="each_head",
        parallel_residual=parallel,
        shared_norm=parallel,
    )


_NORM = "model.layers.{}.self_attn"

STABLELM = Family(
    _config,
    {
        **LLAMA_TABLE,
        "layers.{}.attention.q_norm.scale": Source((f"{_NORM}.q_layernorm.norms.{{head}}.weight",), each_head),
        "layers.{}.attention.k_norm.scale": Source((f"{_NORM}.k_layernorm.norms.{{kv_head}}.weight",), each_head),
    },
)
