"""Mistral: Llama without biases, all layers looking back `sliding_window` tokens unless it is null.

Ministral says in `layer_types` which layers do. In Ministral 3 queries grow with the position. `mistral3` is a Mistral
or a Ministral 3 beside a vision tower.
"""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, common_fields, every_layer_window, layer_kinds_windows
from convert.families.fields import Fields
from convert.families.table import Family
from convert.families.wrapped import inside, text_config
from jaxinfer.config import ModelConfig, QueryScaling

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


_MINISTRAL3 = {
    **_DEFAULTS,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "norm_eps": 1e-5,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS)
    windows = every_layer_window(fields, common["num_layers"], 4096)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    return ModelConfig(family="mistral", **common, windows=windows)


def _ministral(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS)
    windows = layer_kinds_windows(fields, common["num_layers"], 4096)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    return ModelConfig(family="ministral", **common, windows=windows)


def _ministral3(fields: Fields) -> ModelConfig:
    section = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = fields.mapping(section) or dict(_MINISTRAL3_ROPE)
    beta, _ = rope.pop("llama_4_scaling_beta", 0), rope.pop("max_position_embeddings", None)
    fields.replace(section, rope)
    common = common_fields(fields, _MINISTRAL3)
    scaling = None
    if beta:
        length = common["rope"].original_max_position
        if length is None:
            raise ValueError(f"{fields.where}: 'llama_4_scaling_beta' needs 'original_max_position_embeddings'")
        scaling = QueryScaling(Fields({"beta": beta}, f"{fields.where}, {section}").number("beta"), length)
    windows = every_layer_window(fields, common["num_layers"], None)
    return ModelConfig(family="ministral3", **common, windows=windows, query_scaling=scaling)


def _mistral3(fields: Fields) -> ModelConfig:
    fields.ignore(["image_token_index", "image_token_id", "spatial_merge_size", "vision_feature_layer"])
    fields.ignore(["multimodal_projector_bias", "projector_hidden_act"])
    return text_config(fields, "mistral3", {"mistral": _config, "ministral3": _ministral3}, "mistral")


MISTRAL = Family(_config, LLAMA_TABLE)
MINISTRAL = Family(_ministral, LLAMA_TABLE)
MINISTRAL3 = Family(_ministral3, LLAMA_TABLE)
MISTRAL3 = Family(
    _mistral3, inside("language_model", LLAMA_TABLE), ignored=(r"(vision_tower|multi_modal_projector)\..*",)
)
