"""Command R (`cohere`) and Command R7B (`cohere2`): parallel halves, LayerNorm without bias, scaled logits."""

from __future__ import annotations

from convert.families.decoder import common_fields, pattern_windows
from convert.families.fields import Fields
from convert.families.glm import INTERLEAVED_TABLE
from convert.families.table import Family, Source
from convert.joined import each_head_interleaved
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
_NAMES = {"norm_eps": "layer_norm_eps"}


def _cohere(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    fields.ignore(["model_max_length"])  # of the tokenizer
    return ModelConfig(
        family="cohere",
        **common_fields(fields, _DEFAULTS, _NAMES),
        norm="layer",
        parallel_residual=True,
        shared_norm=True,
        qk_norm=fields.boolean("use_qk_norm", False),
        qk_norm_span="each_head",
        logit_scale=fields.number("logit_scale", 0.0625),
        qkv_bias=bias,
        out_bias=bias,
    )


def _cohere2(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    common = common_fields(fields, {**_DEFAULTS, "rope_theta": 10_000.0}, _NAMES)
    fields.expect("use_parallel_block", True)
    fields.expect("use_parallel_embedding", False, True)
    fields.expect("use_embedding_sharing", True)
    fields.expect("use_gated_activation", True)
    fields.expect("use_qk_norm", False)
    fields.expect("layer_switch", 4)
    fields.expect("order_of_interleaved_layers", "local_attn_first")
    fields.expect("position_embedding_type", "rope_gptj")
    fields.expect("rotary_pct", 1.0)
    windows = pattern_windows(fields, common["num_layers"], 4096, 4)
    return ModelConfig(
        family="cohere2",
        **common,
        windows=windows,
        no_rope_layers=tuple(layer for layer in range(common["num_layers"]) if not (windows and windows[layer])),
        norm="layer",
        parallel_residual=True,
        shared_norm=True,
        logit_scale=fields.number("logit_scale", 0.0625),
        qkv_bias=bias,
        out_bias=bias,
    )


COHERE = Family(
    _cohere,
    {
        **INTERLEAVED_TABLE,
        "layers.{}.attention.q_norm.scale": Source(("model.layers.{}.self_attn.q_norm.weight",), each_head_interleaved),
        "layers.{}.attention.k_norm.scale": Source(("model.layers.{}.self_attn.k_norm.weight",), each_head_interleaved),
    },
)
COHERE2 = Family(_cohere2, INTERLEAVED_TABLE)
