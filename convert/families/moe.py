"""Mixtures of experts: Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE, Granite-MoE, gpt-oss."""

from __future__ import annotations

from typing import Any

from convert import joined, transforms
from convert.families.decoder import (
    LLAMA_TABLE,
    common_fields,
    every_layer_window,
    layer_windows,
    linear_rows,
    pattern_windows,
    sliding_layers,
)
from convert.families.fields import Fields
from convert.families.granite import DEFAULTS as GRANITE_DEFAULTS
from convert.families.granite import multipliers
from convert.families.table import Family, Source, Table
from jaxinfer.config import ModelConfig

_MIXTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2 = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
}
_QWEN3 = {**_QWEN2, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
_OLMOE = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "eos_token_id": 50279,
}
_GPT_OSS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_TRAINING = ["output_router_logits", "router_aux_loss_coef", "router_jitter_noise"]


def _experts(fields: Fields, name: str, number: int, per_token: int) -> dict[str, Any]:
    fields.ignore(_TRAINING)
    return {
        "num_experts": fields.integer(name, number),
        "experts_per_token": fields.integer("num_experts_per_tok", per_token),
    }


def _mixtral(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _MIXTRAL)
    return ModelConfig(
        family="mixtral",
        **common,
        **_experts(fields, "num_local_experts", 8, 2),
        expert_size=common["mlp_size"],
        windows=every_layer_window(fields, common["num_layers"], None),
    )


def _qwen(fields: Fields, common: dict[str, Any], per_token: int, size: int, name: str, number: int) -> dict[str, Any]:
    """What Qwen2-MoE and Qwen3-MoE share."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers") or []
    layers = range(common["num_layers"])
    return {
        **common,
        **_experts(fields, name, number, per_token),
        "expert_size": fields.integer("moe_intermediate_size", size),
        "router_normalise": fields.boolean("norm_topk_prob", False),
        "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step != 0),
    }


def _qwen2_moe(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _QWEN2)
    first_without = fields.count("max_window_layers", 28)
    return ModelConfig(
        family="qwen2_moe",
        **_qwen(fields, common, 4, 1408, "num_experts", 60),
        windows=layer_windows(
            fields, common["num_layers"], slides=lambda layer: layer % 2 == 0 and layer < first_without
        ),
        shared_expert_size=fields.integer("shared_expert_intermediate_size", 5632),
        qkv_bias=fields.boolean("qkv_bias", True),
    )


def _qwen3_moe(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    common = common_fields(fields, _QWEN3)
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    return ModelConfig(
        family="qwen3_moe",
        **_qwen(fields, common, 8, 768, name, 128),
        windows=_all_or_none(fields, common["num_layers"]),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )


def _all_or_none(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen3-MoE: in all layers, if in any."""
    used = fields.boolean("use_sliding_window", False) and fields.get("sliding_window", 4096) is not None
    sliding = sliding_layers(fields, num_layers)
    if sliding is not None and sliding != [used] * num_layers:
        raise ValueError(
            f"{fields.where}: 'layer_types' has {'full' if used else 'sliding'} layers, but by 'use_sliding_window' "
            f"and 'sliding_window' {'all' if used else 'none'} of them have the window"
        )
    return layer_windows(fields, num_layers, slides=lambda layer: True)


def _olmoe(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _OLMOE)
    bias, clip = fields.boolean("attention_bias", False), fields.get("clip_qkv")
    if clip is not None:
        fields.number("clip_qkv")
    return ModelConfig(
        family="olmoe",
        **common,
        **_experts(fields, "num_experts", 64, 8),
        expert_size=common["mlp_size"],
        router_normalise=fields.boolean("norm_topk_prob", False),
        qk_norm=True,
        qk_norm_span="all_heads",
        qkv_clip=clip,
        qkv_bias=bias,
        out_bias=bias,
    )


def _granite(fields: Fields) -> ModelConfig:
    common = common_fields(fields, GRANITE_DEFAULTS)
    bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        family="granitemoe",
        **common,
        **multipliers(fields),
        **_experts(fields, "num_local_experts", 8, 2),
        expert_size=common["mlp_size"],
        qkv_bias=bias,
        out_bias=bias,
    )


def _gpt_oss(fields: Fields) -> ModelConfig:
    common = common_fields(fields.with_default("rope_parameters", _GPT_OSS_ROPE, unless="rope_scaling"), _GPT_OSS)
    bias = fields.boolean("attention_bias", True)
    fields.expect("hidden_act", "silu")
    fields.expect("swiglu_alpha", 1.702)
    fields.expect("swiglu_limit", 7.0)
    fields.ignore(["initial_context_length"])  # of the original release's own code
    experts = _experts(fields, "num_local_experts", 128, 4)
    fields.expect("experts_per_token", experts["experts_per_token"])  # again
    return ModelConfig(
        family="gpt_oss",
        **{**common, "activation": "clamped_silu"},
        **experts,
        expert_size=common["mlp_size"],
        expert_bias=True,
        sinks=True,
        windows=pattern_windows(fields, common["num_layers"], 128, 2, fixed=True),
        qkv_bias=bias,
        out_bias=bias,
    )


def expert_rows(block: str, gate: str, up: str, down: str) -> Table:
    """Rows of the router and of experts with tensors of their own."""
    expert = f"{block}.experts.{{expert}}"
    return {
        "layers.{}.mlp.router": Source((f"{block}.gate.weight",), transforms.transposed),
        "layers.{}.mlp.expert_gate_up": Source(
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), joined.expert_gate_up
        ),
        "layers.{}.mlp.expert_down": Source((f"{expert}.{down}.weight",), joined.expert_down),
    }


_QWEN_TABLE: Table = {
    **LLAMA_TABLE,
    **expert_rows("model.layers.{}.mlp", "gate_proj", "up_proj", "down_proj"),
    "layers.{}.mlp.shared_gate_up": Source(
        tuple(f"model.layers.{{}}.mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
        transforms.fused_gate_up,
    ),
    "layers.{}.mlp.shared_down": Source(("model.layers.{}.mlp.shared_expert.down_proj.weight",), transforms.transposed),
    "layers.{}.mlp.shared_router": Source(("model.layers.{}.mlp.shared_expert_gate.weight",), transforms.transposed),
}

MIXTRAL = Family(_mixtral, {**LLAMA_TABLE, **expert_rows("model.layers.{}.block_sparse_moe", "w1", "w3", "w2")})
QWEN2_MOE = Family(_qwen2_moe, _QWEN_TABLE)
QWEN3_MOE = Family(_qwen3_moe, _QWEN_TABLE)
OLMOE = Family(
    _olmoe,
    {
        **_QWEN_TABLE,
        "layers.{}.attention.q_norm.scale": Source(("model.layers.{}.self_attn.q_norm.weight",), joined.heads),
        "layers.{}.attention.k_norm.scale": Source(("model.layers.{}.self_attn.k_norm.weight",), joined.heads),
    },
)
GRANITE_MOE = Family(
    _granite,
    {
        **LLAMA_TABLE,
        "layers.{}.mlp.router": Source(
            ("model.layers.{}.block_sparse_moe.router.layer.weight",), transforms.transposed
        ),
        "layers.{}.mlp.expert_gate_up": Source(
            ("model.layers.{}.block_sparse_moe.input_linear.weight",), joined.stacked_gate_up
        ),
        "layers.{}.mlp.expert_down": Source(
            ("model.layers.{}.block_sparse_moe.output_linear.weight",), joined.stacked_down
        ),
    },
)
GPT_OSS = Family(
    _gpt_oss,
    {
        **LLAMA_TABLE,
        "layers.{}.attention.sinks": Source(("model.layers.{}.self_attn.sinks",), joined.heads),
        **linear_rows("layers.{}.mlp.router", ("model.layers.{}.mlp.router",), transforms.transposed),
        "layers.{}.mlp.expert_gate_up": Source(
            ("model.layers.{}.mlp.experts.gate_up_proj",), joined.interleaved_gate_up
        ),
        "layers.{}.mlp.expert_gate_up_bias": Source(
            ("model.layers.{}.mlp.experts.gate_up_proj_bias",), joined.interleaved_gate_up_bias
        ),
        "layers.{}.mlp.expert_down": Source(("model.layers.{}.mlp.experts.down_proj",), joined.experts_by_input),
        "layers.{}.mlp.expert_down_bias": Source(("model.layers.{}.mlp.experts.down_proj_bias",), transforms.whole),
    },
)
