"""MiniMax-Text-01 and M1: lightning attention in most layers, softmax attention in the others, experts in all.

Checkpoints are of transformers' dialect, or of the original release, which has other names for some fields.
"""

from __future__ import annotations

import operator
from typing import Any

from convert import recurrent, transforms
from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.moe import expert_rows
from convert.families.qwen3_next import recurrent_layers
from convert.families.table import Family, Source
from jaxinfer.config import ModelConfig

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "partial_rotary_factor": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _minimax(fields: Fields) -> ModelConfig:
    """Of transformers."""
    _rotary_dim(fields)
    common = common_fields(fields, _DEFAULTS)
    kinds = fields.per_layer("layer_types", common["num_layers"]) or [
        "linear_attention" if layer % 2 else "full_attention" for layer in range(common["num_layers"])
    ]
    scales = {
        part: (fields.number(f"{part}_alpha_factor", 1.0), fields.number(f"{part}_beta_factor", 1.0))
        for part in ("full_attn", "linear_attn", "mlp")
    }
    return _config(fields, common, kinds, scales, placement="entry")


def _original(fields: Fields) -> ModelConfig:
    """Of the release, whose own code transformers calls remote."""
    _rotary_dim(fields)
    common = common_fields(fields, _DEFAULTS)
    kinds = [_kind(fields, number) for number in fields.per_layer("attn_type_list", common["num_layers"]) or []]
    scales = {
        part: tuple(fields.number(f"layernorm_{name}_{each}", 1.0) for each in ("alpha", "beta"))
        for part, name in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    }
    fields.expect("shared_intermediate_size", 0)
    fields.ignore(["shared_moe_mode"])
    placement = "entry" if fields.boolean("postnorm", False) else "pre"
    return _config(fields, common, kinds, scales, placement)


def _kind(fields: Fields, number: Any) -> str:
    """What `layer_types` calls a layer of `attn_type_list`."""
    if number not in (0, 1):
        raise ValueError(f"{fields.where}: 'attn_type_list' has {number!r}; it is 0 for lightning attention, or 1")
    return "full_attention" if number else "linear_attention"


def _rotary_dim(fields: Fields) -> None:
    """The released checkpoints turn half of a head and say so in this field, which transformers does not read."""
    if fields.get("rotary_dim") is not None:
        shape = (fields.integer(name, _DEFAULTS[name]) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.get("head_dim") or operator.floordiv(*shape)
        fields.replace("partial_rotary_factor", fields.integer("rotary_dim") / head_dim)


def _config(
    fields: Fields, common: dict[str, Any], kinds: list[str], scales: dict[str, Any], placement: Any
) -> ModelConfig:
    fields.expect("hidden_act", "silu")
    fields.expect("sliding_window", None)
    fields.expect("attention_bias", False)
    # Blocks are how transformers computes, not what; the others are of training.
    fields.ignore(["block_size", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"])
    skip, residual = scales["full_attn"]
    heads = {f"recurrent_{name}_heads": common["num_heads"] for name in ("key", "value")}
    dims = {f"recurrent_{name}_dim": common["head_dim"] for name in ("key", "value")}
    return ModelConfig(
        family="minimax",
        **common,
        recurrent_layers=recurrent_layers(fields, kinds, common["num_layers"]),
        recurrence="lightning",
        **heads,
        **dims,
        num_experts=fields.integer("num_local_experts", 8),
        experts_per_token=fields.integer("num_experts_per_tok", 2),
        expert_size=common["mlp_size"],
        norm_placement=placement,
        skip_scale=skip,
        residual_scale=residual,
        recurrent_scales=scales["linear_attn"],
        mlp_scales=scales["mlp"],
    )


_LIGHTNING = "model.layers.{}.self_attn"
_TABLE = {
    **LLAMA_TABLE,
    **expert_rows("model.layers.{}.block_sparse_moe", "w1", "w3", "w2"),
    "layers.{}.attention.qkvz": Source(
        (f"{_LIGHTNING}.qkv_proj.weight", f"{_LIGHTNING}.output_gate.weight"), recurrent.gated_heads
    ),
    "layers.{}.attention.value_norm.scale": Source((f"{_LIGHTNING}.norm.weight",), recurrent.all_heads),
    "layers.{}.attention.heads_out": Source((f"{_LIGHTNING}.out_proj.weight",), transforms.attention_out),
}
_IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)")
"""How heads forget follows from their number and the layer's: some checkpoints store it, rounded to their dtype."""

MINIMAX = Family(_minimax, _TABLE, _IGNORED)
MINIMAX_ORIGINAL = Family(_original, _TABLE, _IGNORED)
