"""OLMo (LayerNorm without weights), OLMo 2 (norms after each half, and over all heads), OLMo 3 (and windows)."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, OUTPUT_NORMS, common_fields, pattern_windows
from convert.families.fields import Fields
from convert.families.rope import layer_ropes
from convert.families.table import Family, Source
from convert.joined import heads
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "eos_token_id": 50279,
}


def _olmo(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    clip = fields.get("clip_qkv")
    return ModelConfig(
        family="olmo",
        **common_fields(fields, _DEFAULTS),
        norm="layer",
        norm_scale=False,
        qkv_bias=bias,
        out_bias=bias,
        qkv_clip=None if clip is None else fields.number("clip_qkv"),
    )


def _olmo2(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        family="olmo2",
        **common_fields(fields, _DEFAULTS),
        norm_placement="output",
        qk_norm=True,
        qk_norm_span="all_heads",
        qkv_bias=bias,
        out_bias=bias,
    )


def _olmo3(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    common = common_fields(fields, _DEFAULTS, rope=False)
    rope, window_rope = layer_ropes(fields, common["max_position"], common["head_dim"], 500_000.0, 500_000.0)
    return ModelConfig(
        family="olmo3",
        **{**common, "rope": rope},
        window_rope=window_rope,
        windows=pattern_windows(fields, common["num_layers"], 4096, 4, fixed=True),
        norm_placement="output",
        qk_norm=True,
        qk_norm_span="all_heads",
        qkv_bias=bias,
        out_bias=bias,
    )


_TABLE = {
    **LLAMA_TABLE,
    **OUTPUT_NORMS,
    "layers.{}.attention.q_norm.scale": Source(("model.layers.{}.self_attn.q_norm.weight",), heads),
    "layers.{}.attention.k_norm.scale": Source(("model.layers.{}.self_attn.k_norm.weight",), heads),
}

OLMO = Family(_olmo, LLAMA_TABLE)
OLMO2 = Family(_olmo2, _TABLE)
OLMO3 = Family(_olmo3, _TABLE)
