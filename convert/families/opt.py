"""OPT, all sizes: 350m normalises after each half and projects its embedding."""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import common_fields, linear_rows, norm_rows
from convert.families.fields import Fields
from convert.families.table import Family, Source
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "relu",
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_OFFSET = 2  # rows of the table of positions before that of the first token


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(
        fields, _DEFAULTS, {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}, rope=False
    )
    before = fields.boolean("do_layer_norm_before", True)
    bare = fields.boolean("_remove_final_layer_norm", False)
    affine = fields.boolean("layer_norm_elementwise_affine", True)
    bias = fields.boolean("enable_bias", True)
    embedding_size = common["hidden_size"]
    if fields.get("word_embed_proj_dim") is not None:
        embedding_size = fields.integer("word_embed_proj_dim")
    return ModelConfig(
        family="opt",
        **common,
        norm="layer",
        norm_scale=affine,
        norm_bias=affine,
        norm_placement="pre" if before else "post",
        final_norm=before and not bare,
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        learned_positions=common["max_position"] + _OFFSET,
        position_offset=_OFFSET,
        embedding_size=None if embedding_size == common["hidden_size"] else embedding_size,
    )


OPT = Family(
    _config,
    {
        "embed.weight": Source(("model.decoder.embed_tokens.weight",), transforms.whole),
        "positions.weight": Source(("model.decoder.embed_positions.weight",), transforms.whole),
        "project_in.weight": Source(("model.decoder.project_in.weight",), transforms.transposed),
        "project_out.weight": Source(("model.decoder.project_out.weight",), transforms.transposed),
        **norm_rows("layers.{}.attention_norm", "model.decoder.layers.{}.self_attn_layer_norm"),
        **linear_rows(
            "layers.{}.attention.qkv",
            tuple(f"model.decoder.layers.{{}}.self_attn.{name}_proj" for name in "qkv"),
            transforms.fused_qkv,
            transforms.fused_qkv_bias,
        ),
        **linear_rows(
            "layers.{}.attention.out", ("model.decoder.layers.{}.self_attn.out_proj",), transforms.attention_out
        ),
        **norm_rows("layers.{}.mlp_norm", "model.decoder.layers.{}.final_layer_norm"),
        **linear_rows("layers.{}.mlp.up", ("model.decoder.layers.{}.fc1",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("model.decoder.layers.{}.fc2",), transforms.transposed),
        **norm_rows("final_norm", "model.decoder.final_layer_norm"),
        "head.weight": Source(("lm_head.weight",), transforms.transposed),
    },
    prefix="model.",
)
