"""Gemma (scaled embedding, norms stored less one), Gemma 2 (sandwich norms, soft caps), Gemma 3's text model."""

from __future__ import annotations

from typing import Any

from convert.families.decoder import LLAMA_TABLE, common_fields, norm_rows, pattern_windows
from convert.families.fields import Fields
from convert.families.rope import layer_ropes
from convert.families.table import Family
from convert.families.wrapped import inside, text_config
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_SMALL = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def _shared(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    bias = fields.boolean("attention_bias", False)
    fields.expect("use_bidirectional_attention", None, False)
    return {
        **common,
        "norm_offset": 1.0,
        "embedding_scale": common["hidden_size"] ** 0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma(fields: Fields) -> ModelConfig:
    fields.expect("hidden_activation", None, "gelu_pytorch_tanh")
    common = common_fields(fields, _DEFAULTS)
    if common["activation"] == "gelu":  # the first releases say so, and mean its approximation
        common["activation"] = "gelu_tanh"
    return ModelConfig(family="gemma", **_shared(fields, common))


def _later(fields: Fields, common: dict[str, Any], caps: tuple[float | None, float | None]) -> dict[str, Any]:
    """What Gemma 2 and 3 share. caps: the defaults of the soft caps of scores and of logits."""
    fields.expect("hidden_act", "gelu_pytorch_tanh")  # some have both fields: this one does not count
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    capped = [fields.get(name, default) for name, default in zip(names, caps, strict=True)]
    return {
        **_shared(fields, common),
        "norm_placement": "sandwich",
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_soft_cap": None if capped[0] is None else fields.number(names[0], capped[0]),
        "logit_soft_cap": None if capped[1] is None else fields.number(names[1], capped[1]),
    }


def _gemma2(fields: Fields) -> ModelConfig:
    common = common_fields(fields, {**_DEFAULTS, **_SMALL}, {"hidden_act": "hidden_activation"})
    windows = pattern_windows(fields, common["num_layers"], 4096, 2, fixed=True)
    fields.expect("sliding_window_size", fields.get("sliding_window", 4096))  # again
    return ModelConfig(family="gemma2", **_later(fields, common, (50.0, 30.0)), windows=windows)


def _gemma3(fields: Fields) -> ModelConfig:
    defaults = {**_DEFAULTS, **_SMALL, "vocab_size": 262208, "max_position_embeddings": 131072}
    common = common_fields(fields, defaults, {"hidden_act": "hidden_activation"}, rope=False)
    fields.expect("attn_logit_softcapping", None)  # transformers has the field, and does not heed it
    rope, window_rope = layer_ropes(fields, common["max_position"], common["head_dim"], 1_000_000.0, 10_000.0)
    return ModelConfig(
        family="gemma3_text",
        **{**_later(fields, common, (None, None)), "rope": rope},
        window_rope=window_rope,
        windows=pattern_windows(fields, common["num_layers"], 4096, 6),
        qk_norm=True,
    )


_SANDWICH = {
    **LLAMA_TABLE,
    **norm_rows("layers.{}.attention_output_norm", "model.layers.{}.post_attention_layernorm"),
    **norm_rows("layers.{}.mlp_norm", "model.layers.{}.pre_feedforward_layernorm"),
    **norm_rows("layers.{}.mlp_output_norm", "model.layers.{}.post_feedforward_layernorm"),
}


def _gemma3_with_images(fields: Fields) -> ModelConfig:
    fields.ignore(["mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"])
    return text_config(fields, "gemma3", {"gemma3_text": _gemma3}, "gemma3_text", tied=True)


GEMMA = Family(_gemma, LLAMA_TABLE)
GEMMA2 = Family(_gemma2, _SANDWICH)
GEMMA3 = Family(_gemma3, _SANDWICH)
GEMMA3_WITH_IMAGES = Family(
    _gemma3_with_images,
    inside("language_model", _SANDWICH),
    ignored=(r"(vision_tower|multi_modal_projector)\..*",),
)
