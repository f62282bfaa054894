"""GLM-4: Llama with partial RoPE that turns neighbouring dimensions; the 0414 release (`glm4`) has sandwich norms."""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import LLAMA_TABLE, common_fields, linear_rows, norm_rows
from convert.families.fields import Fields
from convert.families.table import Family, Table
from convert.joined import joined, rotary_interleaved
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}


def _glm(fields: Fields) -> ModelConfig:
    return ModelConfig(
        family="glm", **common_fields(fields, _DEFAULTS), qkv_bias=fields.boolean("attention_bias", True)
    )


def _glm4(fields: Fields) -> ModelConfig:
    return ModelConfig(
        family="glm4",
        **common_fields(fields, _DEFAULTS),
        qkv_bias=fields.boolean("attention_bias", True),
        norm_placement="sandwich",
    )


INTERLEAVED_TABLE: Table = {
    **LLAMA_TABLE,
    **linear_rows(
        "layers.{}.attention.qkv",
        tuple(f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkv"),
        rotary_interleaved(transforms.fused_qkv),
        rotary_interleaved(transforms.fused_qkv_bias),
    ),
}
"""Llama's, for RoPE that turns neighbouring dimensions."""

_TABLE: Table = {
    **INTERLEAVED_TABLE,
    **linear_rows("layers.{}.mlp.gate_up", ("model.layers.{}.mlp.gate_up_proj",), joined(transforms.fused_gate_up)),
}

GLM = Family(_glm, _TABLE)
GLM4 = Family(
    _glm4,
    {
        **_TABLE,
        **norm_rows("layers.{}.attention_output_norm", "model.layers.{}.post_self_attn_layernorm"),
        **norm_rows("layers.{}.mlp_output_norm", "model.layers.{}.post_mlp_layernorm"),
    },
)
