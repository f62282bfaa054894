"""GPT-2 and what follows its names: GPT-BigCode (one kv head), GPT-Neo (local layers, no scaling of scores)."""

from __future__ import annotations

from typing import Any

from convert import joined, transforms
from convert.families.decoder import common_fields, linear_rows, norm_rows, windows_of
from convert.families.fields import Fields
from convert.families.table import Family, Source, Table
from jaxinfer.config import ModelConfig

GPT_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}
GPT_DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": None,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 1024,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
_BIASES: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated_mlp": False}
"""What all of these have: LayerNorm with a bias, and a plain MLP."""
_RUNNER = [
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "max_batch_size"),
    *("max_sequence_length", "pad_key_length", "pre_allocate_kv_cache", "runner_max_sequence_length"),
    "validate_runner_input",
]
"""Of GPT-BigCode: how its first implementation ran."""


def _gpt2(fields: Fields) -> ModelConfig:
    common = common_fields(fields, GPT_DEFAULTS, GPT_NAMES, rope=False)
    fields.expect("scale_attn_by_inverse_layer_idx", False)
    fields.ignore(["n_ctx", "reorder_and_upcast_attn"])
    return ModelConfig(
        family="gpt2",
        **common,
        **LAYER_NORM,
        **_BIASES,
        attention_scale=None if fields.boolean("scale_attn_weights", True) else 1.0,
        learned_positions=common["max_position"],
    )


def _bigcode(fields: Fields) -> ModelConfig:
    common = common_fields(fields, {**GPT_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"}, GPT_NAMES, rope=False)
    fields.ignore(["n_ctx", *_RUNNER])
    return ModelConfig(
        family="gpt_bigcode",
        **{**common, "num_kv_heads": 1 if fields.boolean("multi_query", True) else common["num_heads"]},
        **LAYER_NORM,
        **_BIASES,
        attention_scale=None if fields.boolean("scale_attn_weights", True) else 1.0,
        learned_positions=common["max_position"],
    )


def _neo(fields: Fields) -> ModelConfig:
    names = {
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    }
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 2048}
    common = common_fields(fields, {**GPT_DEFAULTS, **sizes}, names, rope=False)
    fields.ignore(["attention_layers"])  # attention_types, written out
    types = fields.get("attention_types", [[["global", "local"], 12]])
    try:
        kinds = [kind for pattern, times in types for kind in list(pattern) * times]
    except (TypeError, ValueError):
        raise ValueError(
            f"{fields.where}: 'attention_types' is {types!r}; it must be a list of [kinds, times]"
        ) from None
    if len(kinds) != common["num_layers"]:
        raise ValueError(f"{fields.where}: 'attention_types' is of {len(kinds)} layers, not {common['num_layers']}")
    local = [fields.choice("attention_types", kind, {"global": False, "local": True}) for kind in kinds]
    window = fields.integer("window_size", 256)
    return ModelConfig(
        family="gpt_neo",
        **common,
        **LAYER_NORM,
        **{**_BIASES, "qkv_bias": False},
        attention_scale=1.0,
        learned_positions=common["max_position"],
        windows=windows_of(local, window),
    )


ROWS: Table = {
    "embed.weight": Source(("transformer.wte.weight",), transforms.whole),
    "positions.weight": Source(("transformer.wpe.weight",), transforms.whole),
    **norm_rows("layers.{}.attention_norm", "transformer.h.{}.ln_1"),
    **norm_rows("layers.{}.mlp_norm", "transformer.h.{}.ln_2"),
    **norm_rows("final_norm", "transformer.ln_f"),
    "head.weight": Source(("lm_head.weight",), transforms.transposed),
    "head.bias": Source(("lm_head.bias",), transforms.whole),
}
"""What the families named like GPT-2 share."""

MASKS = (r".*\.(attn|attention|self_attention)(\.attention)?\.(bias|masked_bias)",)
"""Causal masks that older checkpoints hold."""

GPT2 = Family(
    _gpt2,
    {
        **ROWS,  # its linear layers are stored inputs first
        **linear_rows(
            "layers.{}.attention.qkv",
            ("transformer.h.{}.attn.c_attn",),
            joined.qkv_by_input,
            joined.joined(transforms.fused_qkv_bias),
        ),
        **linear_rows("layers.{}.attention.out", ("transformer.h.{}.attn.c_proj",), joined.out_by_input),
        **linear_rows("layers.{}.mlp.up", ("transformer.h.{}.mlp.c_fc",), transforms.whole),
        **linear_rows("layers.{}.mlp.down", ("transformer.h.{}.mlp.c_proj",), transforms.whole),
    },
    ignored=MASKS,
    prefix="transformer.",
)
GPT_BIGCODE = Family(
    _bigcode,
    {
        **ROWS,
        **linear_rows(
            "layers.{}.attention.qkv",
            ("transformer.h.{}.attn.c_attn",),
            joined.grouped_qkv,
            joined.grouped_qkv_bias,
        ),
        **linear_rows("layers.{}.attention.out", ("transformer.h.{}.attn.c_proj",), transforms.attention_out),
        **linear_rows("layers.{}.mlp.up", ("transformer.h.{}.mlp.c_fc",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("transformer.h.{}.mlp.c_proj",), transforms.transposed),
    },
    ignored=MASKS,
    prefix="transformer.",
)
GPT_NEO = Family(
    _neo,
    {
        **ROWS,
        **linear_rows(
            "layers.{}.attention.qkv",
            tuple(f"transformer.h.{{}}.attn.attention.{name}_proj" for name in "qkv"),
            transforms.fused_qkv,
            transforms.fused_qkv_bias,
        ),
        **linear_rows(
            "layers.{}.attention.out", ("transformer.h.{}.attn.attention.out_proj",), transforms.attention_out
        ),
        **linear_rows("layers.{}.mlp.up", ("transformer.h.{}.mlp.c_fc",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("transformer.h.{}.mlp.c_proj",), transforms.transposed),
    },
    ignored=MASKS,
    prefix="transformer.",
)
