"""BERT and RoBERTa (XLM-RoBERTa, CamemBERT), and DistilBERT: encoders, which see both ways and have no head.

What a checkpoint has for training alone, the pooler and the head that predicts masked words, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert import transforms
from convert.families.decoder import common_fields, linear_rows, norm_rows
from convert.families.fields import Fields, token_ids
from convert.families.table import Family, Source, Table
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
_ROBERTA = {"vocab_size": 50265, "bos_token_id": 0, "eos_token_id": 2}
_LATER_VOCABULARY = {"vocab_size": 30522}
"""What the config classes of its successors have by default, whatever their checkpoints have."""
_ENCODER: dict[str, Any] = {
    "bidirectional": True,
    "norm": "layer",
    "norm_bias": True,
    "norm_placement": "post",
    "embed_norm": True,
    "final_norm": False,
    "headless": True,
    "gated_mlp": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}
_TRAINING = """
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    qa_dropout seq_classif_dropout sinusoidal_pos_embds tie_weights_
"""
"""Of training and of heads that are left out; sinusoidal positions are stored like learned ones."""


def _common(fields: Fields, defaults: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """All but the positions, whose number depends on the family."""
    fields.ignore(_TRAINING.split())
    fields.expect("is_decoder", False)
    fields.expect("position_embedding_type", "absolute", None)
    common = common_fields(fields, {**_DEFAULTS, **defaults}, names, rope=False)
    return {**common, **_ENCODER, "learned_positions": common["max_position"]}


def _bert(fields: Fields) -> ModelConfig:
    types = fields.integer("type_vocab_size", 2)
    return ModelConfig(family="bert", **_common(fields, {}, {"norm_eps": "layer_norm_eps"}), token_types=types)


def _roberta(fields: Fields) -> ModelConfig:
    """Rows of the table of positions up to that of the padding id are not those of any token."""
    family = fields.get("model_type")
    defaults = _ROBERTA if family == "roberta" else {**_ROBERTA, **_LATER_VOCABULARY}
    common = _common(fields, defaults, {"norm_eps": "layer_norm_eps"})
    padding = token_ids(fields, "pad_token_id", 1)
    if len(padding) != 1:
        raise ValueError(
            f"{fields.where}: 'pad_token_id' is {list(padding)}; positions are counted from it: give one id"
        )
    offset = padding[0] + 1
    common["max_position"] -= offset
    return ModelConfig(
        family=family, **common, position_offset=offset, token_types=fields.integer("type_vocab_size", 2)
    )


def _distilbert(fields: Fields) -> ModelConfig:
    names = {
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
    }
    return ModelConfig(family="distilbert", **_common(fields, {"num_hidden_layers": 6}, names))


def _rows(model: str) -> Table:
    layer = f"{model}.encoder.layer.{{}}"
    return {
        "embed.weight": Source((f"{model}.embeddings.word_embeddings.weight",), transforms.whole),
        "positions.weight": Source((f"{model}.embeddings.position_embeddings.weight",), transforms.whole),
        "token_types.weight": Source((f"{model}.embeddings.token_type_embeddings.weight",), transforms.whole),
        **norm_rows("embed_norm", f"{model}.embeddings.LayerNorm"),
        **linear_rows(
            "layers.{}.attention.qkv",
            tuple(f"{layer}.attention.self.{name}" for name in ("query", "key", "value")),
            transforms.fused_qkv,
            transforms.fused_qkv_bias,
        ),
        **linear_rows("layers.{}.attention.out", (f"{layer}.attention.output.dense",), transforms.attention_out),
        **norm_rows("layers.{}.attention_norm", f"{layer}.attention.output.LayerNorm"),
        **linear_rows("layers.{}.mlp.up", (f"{layer}.intermediate.dense",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", (f"{layer}.output.dense",), transforms.transposed),
        **norm_rows("layers.{}.mlp_norm", f"{layer}.output.LayerNorm"),
    }


_BLOCK = "distilbert.transformer.layer.{}"
_DISTILBERT_ROWS: Table = {
    "embed.weight": Source(("distilbert.embeddings.word_embeddings.weight",), transforms.whole),
    "positions.weight": Source(("distilbert.embeddings.position_embeddings.weight",), transforms.whole),
    **norm_rows("embed_norm", "distilbert.embeddings.LayerNorm"),
    **linear_rows(
        "layers.{}.attention.qkv",
        tuple(f"{_BLOCK}.attention.{name}_lin" for name in "qkv"),
        transforms.fused_qkv,
        transforms.fused_qkv_bias,
    ),
    **linear_rows("layers.{}.attention.out", (f"{_BLOCK}.attention.out_lin",), transforms.attention_out),
    **norm_rows("layers.{}.attention_norm", f"{_BLOCK}.sa_layer_norm"),
    **linear_rows("layers.{}.mlp.up", (f"{_BLOCK}.ffn.lin1",), transforms.transposed),
    **linear_rows("layers.{}.mlp.down", (f"{_BLOCK}.ffn.lin2",), transforms.transposed),
    **norm_rows("layers.{}.mlp_norm", f"{_BLOCK}.output_layer_norm"),
}
_LEFT_OUT = (
    r"(.*\.)?embeddings\.position_ids",
    r"(.*\.)?pooler\..*",
    r"cls\..*",
    r"lm_head\..*",
    r"vocab_(transform|layer_norm|projector)\..*",
)
_OLD_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

BERT = Family(_bert, _rows("bert"), ignored=_LEFT_OUT, prefix="bert.", old_endings=_OLD_ENDINGS)
ROBERTA = Family(_roberta, _rows("roberta"), ignored=_LEFT_OUT, prefix="roberta.", old_endings=_OLD_ENDINGS)
DISTILBERT = Family(_distilbert, _DISTILBERT_ROWS, ignored=_LEFT_OUT, prefix="distilbert.")
