"""Phi-1 to 2 (`phi`: parallel halves, LayerNorm, biases everywhere), Phi-3 and Phi-4 (`phi3`: fused Llama)."""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import LLAMA_TABLE, common_fields, every_layer_window, linear_rows, norm_rows
from convert.families.fields import Fields
from convert.families.table import Family
from convert.joined import joined
from jaxinfer.config import ModelConfig

_PHI = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PHI3 = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 32000,
}


def _phi(fields: Fields) -> ModelConfig:
    fields.expect("qk_layernorm", False)
    fields.expect("tie_word_embeddings", False)  # the head has a bias
    return ModelConfig(
        family="phi",
        **common_fields(fields, _PHI, {"norm_eps": "layer_norm_eps"}),
        norm="layer",
        norm_bias=True,
        parallel_residual=True,
        shared_norm=True,
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def _phi3(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _PHI3)
    for name in ("attention_bias", "lm_head_bias", "mlp_bias"):
        fields.expect(name, False)
    fields.expect("full_attn_mod", 1)  # of Phi-4-mini: every so manieth layer looks at everything
    fields.expect("interpolate_factor", 1)
    return ModelConfig(family="phi3", **common, windows=every_layer_window(fields, common["num_layers"], None))


PHI = Family(
    _phi,
    {
        **LLAMA_TABLE,
        **linear_rows("layers.{}.attention.out", ("model.layers.{}.self_attn.dense",), transforms.attention_out),
        **linear_rows("layers.{}.mlp.up", ("model.layers.{}.mlp.fc1",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("model.layers.{}.mlp.fc2",), transforms.transposed),
        **norm_rows("final_norm", "model.final_layernorm"),
    },
)
PHI3 = Family(
    _phi3,
    {
        **LLAMA_TABLE,
        **linear_rows("layers.{}.attention.qkv", ("model.layers.{}.self_attn.qkv_proj",), joined(transforms.fused_qkv)),
        **linear_rows("layers.{}.mlp.gate_up", ("model.layers.{}.mlp.gate_up_proj",), joined(transforms.fused_gate_up)),
    },
)
