"""DeepSeek-V2 and V3 (and R1): latent attention, experts in groups, shared experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from convert import joined, transforms
from convert.families.decoder import LLAMA_TABLE, common_fields
from convert.families.fields import Fields
from convert.families.moe import expert_rows
from convert.families.rope import rope_config, yarn_mscale
from convert.families.table import Family, Source, Table
from jaxinfer.config import ModelConfig

_V2 = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "n_group": None,
    "topk_group": None,
}
_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}


def _shared(fields: Fields, defaults: dict[str, Any]) -> dict[str, Any]:
    common = common_fields(fields, {**defaults, "head_dim": 2}, rope=False)  # heads are made of other fields
    fields.ignore(["head_dim", "qk_head_dim"])
    fields.expect("num_key_value_heads", common["num_heads"], None)
    fields.ignore(["aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "num_nextn_predict_layers"])
    fields.ignore(["num_mtp_layers", "router_aux_loss_coef"])
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    fields.expect("pretraining_tp", 1)
    fields.expect("moe_layer_freq", 1)
    nope, rope_dim = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    latent, queries = fields.integer("kv_lora_rank", 512), fields.get("q_lora_rank", 1536)
    rope = rope_config(fields, common["max_position"], rope_dim)
    scale = (nope + rope_dim) ** -0.5
    section = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    if rope.kind != "default" and section.get("mscale_all_dim"):
        scale *= yarn_mscale(rope.factor, section["mscale_all_dim"]) ** 2
    size = fields.integer("moe_intermediate_size", defaults["moe_intermediate_size"])
    return {
        **common,
        "num_kv_heads": 1,
        "head_dim": rope_dim + latent,
        "rope": dataclasses.replace(rope, dims=rope_dim),
        "attention_scale": scale,
        "kv_lora_rank": latent,
        "q_lora_rank": 0 if queries is None else fields.integer("q_lora_rank", queries),
        "qk_nope_dim": nope,
        "qk_rope_dim": rope_dim,
        "v_head_dim": fields.integer("v_head_dim", 128),
        "num_experts": fields.integer("n_routed_experts", defaults["n_routed_experts"]),
        "experts_per_token": fields.integer("num_experts_per_tok", defaults["num_experts_per_tok"]),
        "expert_size": size,
        "shared_expert_size": size * fields.integer("n_shared_experts", defaults["n_shared_experts"]),
        "shared_expert_gate": False,
        "dense_layers": tuple(range(fields.count("first_k_dense_replace", defaults["first_k_dense_replace"]))),
        "router_scale": fields.number("routed_scaling_factor", defaults["routed_scaling_factor"]),
    }


def _groups(fields: Fields, defaults: dict[str, Any]) -> dict[str, Any]:
    return {
        "router_groups": fields.integer("n_group", defaults["n_group"]),
        "router_top_groups": fields.integer("topk_group", defaults["topk_group"]),
    }


def _v2(fields: Fields) -> ModelConfig:
    fields.expect("norm_topk_prob", False)
    fields.expect("scoring_func", "softmax")
    methods = {"greedy": False, "group_limited_greedy": True}
    grouped = fields.choice("topk_method", fields.get("topk_method", "greedy"), methods)
    groups = _groups(fields, _V2) if grouped else {}
    fields.ignore(["n_group", "topk_group"])
    return ModelConfig(family="deepseek_v2", **_shared(fields, _V2), **groups, router_normalise=False)


def _v3(fields: Fields) -> ModelConfig:
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    fields.expect("rope_interleave", True)
    return ModelConfig(
        family="deepseek_v3",
        **_shared(fields, _V3),
        **_groups(fields, _V3),
        router_normalise=fields.boolean("norm_topk_prob", True),
        router_score="sigmoid",
        router_correction_bias=True,
        router_group_score="top2",
    )


def _rows(config: ModelConfig) -> Table:
    attention, mlp = "model.layers.{}.self_attn", "model.layers.{}.mlp"
    last_query = "q_b_proj" if config.q_lora_rank else "q_proj"
    return {
        **LLAMA_TABLE,
        "layers.{}.attention.q_a": Source((f"{attention}.q_a_proj.weight",), transforms.transposed),
        "layers.{}.attention.q_a_norm.scale": Source((f"{attention}.q_a_layernorm.weight",), transforms.whole),
        "layers.{}.attention.q_b": Source((f"{attention}.{last_query}.weight",), joined.latent_queries),
        "layers.{}.attention.kv_a": Source((f"{attention}.kv_a_proj_with_mqa.weight",), joined.latent_keys),
        "layers.{}.attention.kv_a_norm.scale": Source((f"{attention}.kv_a_layernorm.weight",), transforms.whole),
        "layers.{}.attention.kv_b": Source((f"{attention}.kv_b_proj.weight",), joined.latent_expansion),
        "layers.{}.attention.heads_out": Source((f"{attention}.o_proj.weight",), transforms.attention_out),
        **expert_rows(mlp, "gate_proj", "up_proj", "down_proj"),
        "layers.{}.mlp.router_correction_bias": Source((f"{mlp}.gate.e_score_correction_bias",), transforms.whole),
        "layers.{}.mlp.shared_gate_up": Source(
            tuple(f"{mlp}.shared_experts.{name}_proj.weight" for name in ("gate", "up")), transforms.fused_gate_up
        ),
        "layers.{}.mlp.shared_down": Source((f"{mlp}.shared_experts.down_proj.weight",), transforms.transposed),
    }


DEEPSEEK_V2 = Family(_v2, _rows)
DEEPSEEK_V3 = Family(_v3, _rows, ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.61\..*"))
"""The 62nd layer predicts a second token ahead, which nobody asks for."""
