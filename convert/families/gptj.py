"""GPT-J (partial RoPE over neighbouring dimensions), GPT-NeoX and Pythia: both halves of a layer in parallel."""

from __future__ import annotations

from convert import joined, transforms
from convert.families.decoder import common_fields, linear_rows, norm_rows
from convert.families.fields import Fields
from convert.families.gpt2 import GPT_DEFAULTS, GPT_NAMES, LAYER_NORM, MASKS, ROWS
from convert.families.table import Family, Source
from jaxinfer.config import ModelConfig, RopeConfig

_GPTJ = {
    **GPT_DEFAULTS,
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_NEOX = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_NEOX_NAMES = {
    "norm_eps": "layer_norm_eps",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
}


def _gptj(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _GPTJ, GPT_NAMES, rope=False)
    fields.ignore(["n_ctx", "scale_attn_weights"])
    fields.expect("rotary", True)
    fields.expect("tie_word_embeddings", False)  # the head has a bias
    dims = fields.get("rotary_dim", 64)
    dims = None if dims in (None, common["head_dim"]) else fields.integer("rotary_dim", dims)
    return ModelConfig(
        family="gptj",
        **{**common, "rope": RopeConfig(dims=dims)},
        **LAYER_NORM,
        mlp_bias=True,
        head_bias=True,
        parallel_residual=True,
        shared_norm=True,
    )


def _neox(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", True)
    return ModelConfig(
        family="gpt_neox",
        **common_fields(fields, _NEOX, _NEOX_NAMES),
        **LAYER_NORM,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        parallel_residual=fields.boolean("use_parallel_residual", True),
    )


GPTJ = Family(
    _gptj,
    {
        **ROWS,
        **linear_rows(
            "layers.{}.attention.qkv",
            tuple(f"transformer.h.{{}}.attn.{name}_proj" for name in "qkv"),
            joined.rotary_interleaved(transforms.fused_qkv),
        ),
        **linear_rows("layers.{}.attention.out", ("transformer.h.{}.attn.out_proj",), transforms.attention_out),
        **linear_rows("layers.{}.mlp.up", ("transformer.h.{}.mlp.fc_in",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("transformer.h.{}.mlp.fc_out",), transforms.transposed),
    },
    ignored=MASKS,
    prefix="transformer.",
)
GPT_NEOX = Family(
    _neox,
    {
        "embed.weight": Source(("gpt_neox.embed_in.weight",), transforms.whole),
        **norm_rows("layers.{}.attention_norm", "gpt_neox.layers.{}.input_layernorm"),
        **linear_rows(
            "layers.{}.attention.qkv",
            ("gpt_neox.layers.{}.attention.query_key_value",),
            joined.grouped_qkv,
            joined.grouped_qkv_bias,
        ),
        **linear_rows("layers.{}.attention.out", ("gpt_neox.layers.{}.attention.dense",), transforms.attention_out),
        **norm_rows("layers.{}.mlp_norm", "gpt_neox.layers.{}.post_attention_layernorm"),
        **linear_rows("layers.{}.mlp.up", ("gpt_neox.layers.{}.mlp.dense_h_to_4h",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("gpt_neox.layers.{}.mlp.dense_4h_to_h",), transforms.transposed),
        **norm_rows("final_norm", "gpt_neox.final_layer_norm"),
        "head.weight": Source(("embed_out.weight",), transforms.transposed),
    },
    ignored=(*MASKS, r".*\.rotary_emb\.inv_freq"),
)
