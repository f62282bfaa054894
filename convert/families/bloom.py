"""Decoders with ALiBi: BLOOM, MPT, and Falcon, which may have RoPE instead."""

from __future__ import annotations

from convert import joined, transforms
from convert.families.decoder import common_fields, linear_rows, norm_rows
from convert.families.fields import Fields
from convert.families.general import skip_general
from convert.families.gpt2 import LAYER_NORM, MASKS
from convert.families.table import Family, Source, Table
from jaxinfer.config import ModelConfig

_BLOOM = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "intermediate_size": None,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FALCON = {
    **_BLOOM,
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_act": "gelu",
    "bos_token_id": 11,
    "eos_token_id": 11,
}
_MPT = {
    **_BLOOM,
    "vocab_size": 50368,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "bos_token_id": None,
    "eos_token_id": None,
}


def _bloom(fields: Fields) -> ModelConfig:
    names = {
        "num_hidden_layers": "n_layer" if "n_layer" in fields else "num_hidden_layers",
        "num_attention_heads": "n_head" if "n_head" in fields else "num_attention_heads",
        "hidden_size": "n_embed" if "n_embed" in fields else "hidden_size",
        "max_position_embeddings": "seq_length",
        "norm_eps": "layer_norm_epsilon",
    }
    common = common_fields(fields, _BLOOM, names, rope=False)
    fields.expect("hidden_size", common["hidden_size"])  # again, beside n_embed
    fields.expect("n_inner", None, common["mlp_size"])
    fields.expect("apply_residual_connection_post_layernorm", False)
    fields.ignore(["pretraining_tp", "slow_but_exact", "masked_softmax_fusion", "bias_dropout_fusion"])
    fields.ignore(["offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32"])
    return ModelConfig(
        family="bloom",
        **common,
        **LAYER_NORM,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        embed_norm=True,
        alibi_max_bias=8.0,
    )


def _falcon(fields: Fields) -> ModelConfig:
    names = {
        "num_hidden_layers": "n_layer" if "n_layer" in fields else "num_hidden_layers",
        "num_attention_heads": "n_head" if "n_head" in fields else "num_attention_heads",
        "num_key_value_heads": "n_head_kv" if "n_head_kv" in fields else "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "norm_eps": "layer_norm_epsilon",
    }
    fields.expect("apply_residual_connection_post_layernorm", False)
    alibi = fields.boolean("alibi", False)
    common = common_fields(fields, _FALCON, names, rope=not alibi)
    fields.expect("ff_factor", common["mlp_size"] / common["hidden_size"])  # again
    if alibi:
        fields.ignore(["rope_theta", "rope_parameters", "rope_scaling"])
    grouped = fields.boolean("new_decoder_architecture", False)
    one_kv_head = fields.boolean("multi_query", True) and not grouped
    parallel = fields.boolean("parallel_attn", True)
    if grouped and not parallel:
        raise ValueError(f"{fields.where}: 'parallel_attn' is False with 'new_decoder_architecture', which is parallel")
    norms = fields.get("num_ln_in_parallel_attn")
    norms = (2 if grouped else 1) if norms is None else fields.integer("num_ln_in_parallel_attn", norms)
    if norms == 2 and not grouped:
        raise ValueError(f"{fields.where}: 'num_ln_in_parallel_attn' is 2 without 'new_decoder_architecture'")
    bias = fields.boolean("bias", False)
    return ModelConfig(
        family="falcon",
        **{**common, "num_kv_heads": 1 if one_kv_head else common["num_kv_heads"]},
        **LAYER_NORM,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel_residual=parallel,
        shared_norm=parallel and norms == 1,
        alibi_max_bias=8.0 if alibi else None,
        alibi_scale=common["head_dim"] ** -0.5 if alibi else 1.0,
    )


def _mpt(fields: Fields) -> ModelConfig:
    names = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
        "norm_eps": "layer_norm_epsilon",
    }
    common = common_fields(fields, _MPT, names, rope=False)
    fields.expect("expansion_ratio", 4)
    fields.expect("no_bias", True)
    fields.expect("logit_scale", None)
    fields.expect("embedding_fraction", 1.0)
    fields.expect("norm_type", "low_precision_layernorm")
    fields.ignore(["learned_pos_emb", "init_config", "init_device", "verbose", "use_pad_tok_in_ffn", "tokenizer_name"])
    attention = fields.section("attn_config")
    skip_general(attention)
    attention.expect("alibi", True)
    attention.expect("qk_ln", False)
    attention.expect("prefix_lm", False)
    attention.expect("attn_uses_sequence_id", False)
    attention.expect("attn_type", "multihead_attention")
    attention.ignore(["attn_impl"])
    clip, scale = attention.get("clip_qkv"), attention.get("softmax_scale")
    config = ModelConfig(
        family="mpt",
        **common,
        norm="layer",
        gated_mlp=False,
        qkv_clip=attention.number("clip_qkv") if clip else None,
        attention_scale=None if scale is None else attention.number("softmax_scale"),
        alibi_max_bias=attention.number("alibi_bias_max", 8),
    )
    attention.finish()
    return config


_GROUPED: Table = {
    "embed.weight": Source(("transformer.word_embeddings.weight",), transforms.whole),
    **norm_rows("embed_norm", "transformer.word_embeddings_layernorm"),
    **norm_rows("layers.{}.attention_norm", "transformer.h.{}.input_layernorm"),
    **linear_rows(
        "layers.{}.attention.qkv",
        ("transformer.h.{}.self_attention.query_key_value",),
        joined.grouped_qkv,
        joined.grouped_qkv_bias,
    ),
    **linear_rows("layers.{}.attention.out", ("transformer.h.{}.self_attention.dense",), transforms.attention_out),
    **norm_rows("layers.{}.mlp_norm", "transformer.h.{}.post_attention_layernorm"),
    **linear_rows("layers.{}.mlp.up", ("transformer.h.{}.mlp.dense_h_to_4h",), transforms.transposed),
    **linear_rows("layers.{}.mlp.down", ("transformer.h.{}.mlp.dense_4h_to_h",), transforms.transposed),
    **norm_rows("final_norm", "transformer.ln_f"),
    "head.weight": Source(("lm_head.weight",), transforms.transposed),
}
_TWO_NORMS: Table = {
    **_GROUPED,
    **norm_rows("layers.{}.attention_norm", "transformer.h.{}.ln_attn"),
    **norm_rows("layers.{}.mlp_norm", "transformer.h.{}.ln_mlp"),
}

BLOOM = Family(_bloom, _GROUPED, ignored=MASKS, prefix="transformer.")
FALCON = Family(
    _falcon,
    lambda config: _TWO_NORMS if config.parallel_residual and not config.shared_norm else _GROUPED,
    ignored=(*MASKS, r".*\.rotary_emb\.inv_freq"),
    prefix="transformer.",
)
MPT = Family(
    _mpt,
    {
        "embed.weight": Source(("transformer.wte.weight",), transforms.whole),
        **norm_rows("layers.{}.attention_norm", "transformer.blocks.{}.norm_1"),
        **linear_rows(
            "layers.{}.attention.qkv", ("transformer.blocks.{}.attn.Wqkv",), joined.joined(transforms.fused_qkv)
        ),
        **linear_rows("layers.{}.attention.out", ("transformer.blocks.{}.attn.out_proj",), transforms.attention_out),
        **norm_rows("layers.{}.mlp_norm", "transformer.blocks.{}.norm_2"),
        **linear_rows("layers.{}.mlp.up", ("transformer.blocks.{}.ffn.up_proj",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("transformer.blocks.{}.ffn.down_proj",), transforms.transposed),
        **norm_rows("final_norm", "transformer.norm_f"),
        "head.weight": Source(("lm_head.weight",), transforms.transposed),
    },
    prefix="transformer.",
)
