"""SmolLM3: Llama whose every fourth layer has no positions."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, common_fields, layer_windows
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS)
    layers = range(common["num_layers"])
    interval = fields.integer("no_rope_layer_interval", 4)
    has_rope = fields.per_layer("no_rope_layers", len(layers))  # despite its name: 1 where there is RoPE
    has_rope = [(layer + 1) % interval != 0 for layer in layers] if has_rope is None else has_rope
    bias = fields.boolean("attention_bias", False)
    fields.expect("pretraining_tp", 1, 2)  # of training: the weights are whole
    return ModelConfig(
        family="smollm3",
        **common,
        windows=layer_windows(fields, len(layers), slides=lambda layer: not has_rope[layer], default=None),
        no_rope_layers=tuple(layer for layer in layers if not has_rope[layer]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


SMOLLM3 = Family(_config, LLAMA_TABLE)
