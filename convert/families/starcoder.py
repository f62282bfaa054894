"""StarCoder2: LayerNorm, biases and a plain MLP, with RoPE and windows."""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import LLAMA_TABLE, common_fields, every_layer_window, linear_rows
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS, {"norm_eps": "norm_epsilon"})
    bias = fields.boolean("use_bias", True)
    fields.expect("mlp_type", "default")
    fields.expect("norm_type", "layer_norm")
    fields.expect("layer_norm_epsilon", common["norm_eps"])  # again
    fields.expect("scale_attn_weights", True)
    fields.ignore(["attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"])
    return ModelConfig(
        family="starcoder2",
        **common,
        windows=every_layer_window(fields, common["num_layers"], None),
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


STARCODER2 = Family(
    _config,
    {
        **LLAMA_TABLE,
        **linear_rows("layers.{}.mlp.up", ("model.layers.{}.mlp.c_fc",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("model.layers.{}.mlp.c_proj",), transforms.transposed),
    },
)
