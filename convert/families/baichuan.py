"""Baichuan and Baichuan 2: Llama with queries, keys and values in one tensor; the 13B models have ALiBi, not RoPE.

Baichuan 2 brings the rows of its head to length one. No field says so: the vocabulary tells the releases apart.
"""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.table import Family, Source
from convert.joined import joined
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 64000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VOCABULARIES = {64000: False, 125696: True}
"""Of Baichuan and of Baichuan 2, whose head is normalised."""


def _config(fields: Fields) -> ModelConfig:
    # Only the 13B models, whose positions are ALiBi, lack this field: `model_max_length` is their length.
    alibi = "max_position_embeddings" not in fields
    names = {"max_position_embeddings": "model_max_length"} if alibi else {}
    common = common_fields(fields, _DEFAULTS, names, rope=not alibi)
    fields.ignore(["_from_model_config", "model_max_length", "z_loss_weight"])
    return ModelConfig(
        family="baichuan",
        **common,
        alibi_max_bias=8.0 if alibi else None,
        head_norm=_normalises_head(fields, common["vocab_size"]),
    )


def _normalises_head(fields: Fields, vocab_size: int) -> bool:
    if "norm_head" in fields:
        return fields.boolean("norm_head", False)
    if vocab_size not in _VOCABULARIES:
        raise ValueError(
            f"{fields.where}: 'vocab_size' is {vocab_size}, neither Baichuan's 64000 nor Baichuan 2's 125696; add "
            "'norm_head': true if the head is normalised, as in Baichuan 2, or false"
        )
    return _VOCABULARIES[vocab_size]


BAICHUAN = Family(
    _config,
    {
        **LLAMA_TABLE,
        "layers.{}.attention.qkv": Source(("model.layers.{}.self_attn.W_pack.weight",), joined(transforms.fused_qkv)),
    },
)
