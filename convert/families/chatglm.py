"""ChatGLM 2 and 3 and GLM-4 as first released: the `glm` family under other names, queries, keys and values in one."""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import common_fields, linear_rows, norm_rows
from convert.families.fields import Fields
from convert.families.table import Family, Source
from convert.joined import joined, rotary_interleaved
from jaxinfer.config import ModelConfig, RopeConfig

_DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
}
_NAMES = {
    "vocab_size": "padded_vocab_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "seq_length",
    "norm_eps": "layernorm_epsilon",
}


def _config(fields: Fields) -> ModelConfig:
    head_dim = fields.integer("kv_channels", 128)
    common = common_fields(fields, {**_DEFAULTS, "head_dim": head_dim}, _NAMES, rope=False)
    groups = fields.integer("multi_query_group_num", 1)
    for name, value in {
        "rmsnorm": True,
        "original_rope": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "add_bias_linear": False,
        "pre_seq_len": None,
        "quantization_bit": 0,
    }.items():
        fields.expect(name, value)
    # Of training, and how the same sums are ordered.
    fields.ignore(
        ["vocab_size", "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "fp32_residual_connection"]
    )
    fields.ignore(["bias_dropout_fusion", "prefix_projection", "interleaved_qkv"])
    theta = 10_000.0 * fields.number("rope_ratio", 1.0)
    return ModelConfig(
        family="chatglm",
        **{
            **common,
            "num_kv_heads": groups if fields.boolean("multi_query_attention", False) else common["num_heads"],
            "rope": RopeConfig(theta=theta, dims=head_dim // 2),
        },
        qkv_bias=fields.boolean("add_qkv_bias", False),
    )


_LAYER = "transformer.encoder.layers.{}"

CHATGLM = Family(
    _config,
    {
        "embed.weight": Source(("transformer.embedding.word_embeddings.weight",), transforms.whole),
        **norm_rows("layers.{}.attention_norm", f"{_LAYER}.input_layernorm"),
        **linear_rows(
            "layers.{}.attention.qkv",
            (f"{_LAYER}.self_attention.query_key_value",),
            joined(rotary_interleaved(transforms.fused_qkv)),
            joined(rotary_interleaved(transforms.fused_qkv_bias)),
        ),
        "layers.{}.attention.out": Source((f"{_LAYER}.self_attention.dense.weight",), transforms.attention_out),
        **norm_rows("layers.{}.mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        "layers.{}.mlp.gate_up": Source((f"{_LAYER}.mlp.dense_h_to_4h.weight",), joined(transforms.fused_gate_up)),
        "layers.{}.mlp.down": Source((f"{_LAYER}.mlp.dense_4h_to_h.weight",), transforms.transposed),
        **norm_rows("final_norm", "transformer.encoder.final_layernorm"),
        "head.weight": Source(("transformer.output_layer.weight",), transforms.transposed),
    },
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
)
