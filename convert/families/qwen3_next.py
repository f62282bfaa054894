"""Qwen3-Next: three of four layers are Gated DeltaNet, the others gated attention; experts with a shared one."""

from __future__ import annotations

from typing import Any

from convert import recurrent, transforms
from convert.families.decoder import common_fields
from convert.families.fields import Fields
from convert.families.moe import QWEN3_MOE
from convert.families.table import Family, Source
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
_KINDS = {"linear_attention": True, "full_attention": False}


def recurrent_layers(fields: Fields, kinds: list[str], num_layers: int) -> tuple[int, ...]:
    """Those of `kinds`, one for each layer, that are linear. Raises ValueError for a kind that is not known."""
    if len(kinds) != num_layers:
        raise ValueError(f"{fields.where}: kinds of {len(kinds)} layers are given, and there are {num_layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if fields.choice("layer_types", kind, _KINDS))


def _recurrent(fields: Fields, num_layers: int) -> dict[str, Any]:
    interval, kinds = fields.integer("full_attention_interval", 4), fields.per_layer("layer_types", num_layers)
    if kinds is None:
        full = [(layer + 1) % interval == 0 for layer in range(num_layers)]
        kinds = ["full_attention" if one else "linear_attention" for one in full]
    return {
        "recurrent_layers": recurrent_layers(fields, kinds, num_layers),
        "recurrence": "gated_delta",
        "recurrent_key_heads": fields.integer("linear_num_key_heads", 16),
        "recurrent_value_heads": fields.integer("linear_num_value_heads", 32),
        "recurrent_key_dim": fields.integer("linear_key_head_dim", 128),
        "recurrent_value_dim": fields.integer("linear_value_head_dim", 128),
        "conv_width": fields.integer("linear_conv_kernel_dim", 4),
    }


def _qwen3_next(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS)
    layers = range(common["num_layers"])
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    fields.expect("use_sliding_window", False)
    fields.ignore(["output_router_logits", "router_aux_loss_coef"])
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers") or []
    return ModelConfig(
        family="qwen3_next",
        **common,
        **_recurrent(fields, common["num_layers"]),
        norm_offset=1.0,
        qk_norm=True,
        attention_gate=True,
        num_experts=fields.integer("num_experts", 512),
        experts_per_token=fields.integer("num_experts_per_tok", 10),
        expert_size=fields.integer("moe_intermediate_size", 512),
        shared_expert_size=fields.integer("shared_expert_intermediate_size", 512),
        router_normalise=fields.boolean("norm_topk_prob", True),
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step != 0),
    )


_LINEAR = "model.layers.{}.linear_attn"

QWEN3_NEXT = Family(
    _qwen3_next,
    {
        **QWEN3_MOE.table,  # type: ignore[dict-item]
        "layers.{}.attention.qkv": Source(
            tuple(f"model.layers.{{}}.self_attn.{name}_proj.weight" for name in "qkv"), recurrent.gated_qkv
        ),
        "layers.{}.attention.qkvz": Source((f"{_LINEAR}.in_proj_qkvz.weight",), recurrent.by_head),
        "layers.{}.attention.ba": Source((f"{_LINEAR}.in_proj_ba.weight",), recurrent.by_head),
        "layers.{}.attention.conv": Source((f"{_LINEAR}.conv1d.weight",), recurrent.convolution),
        "layers.{}.attention.log_decay": Source((f"{_LINEAR}.A_log",), recurrent.each_value_head),
        "layers.{}.attention.step_bias": Source((f"{_LINEAR}.dt_bias",), recurrent.each_value_head),
        "layers.{}.attention.value_norm.scale": Source((f"{_LINEAR}.norm.weight",), transforms.whole),
        "layers.{}.attention.heads_out": Source((f"{_LINEAR}.out_proj.weight",), transforms.attention_out),
    },
    ignored=(r".*\.rotary_emb\.inv_freq", r"mtp\..*"),
)
"""The tensors of `mtp` predict a second token ahead, which nobody asks for."""
