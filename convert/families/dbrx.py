"""DBRX: experts, LayerNorm without bias, clipped queries, keys and values."""

from __future__ import annotations

from convert import joined, transforms
from convert.families.decoder import common_fields, norm_rows
from convert.families.fields import Fields
from convert.families.general import skip_general
from convert.families.table import Family, Source
from jaxinfer.config import ModelConfig, RopeConfig

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": None,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
}
_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS, _NAMES, rope=False)
    fields.expect("router_aux_loss_coef", 0.05)
    fields.ignore(["output_router_logits"])
    attention, mlp = fields.section("attn_config"), fields.section("ffn_config")
    skip_general(attention)
    skip_general(mlp)
    clip = attention.get("clip_qkv")
    mlp.ignore(["moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment", "hidden_size"])
    mlp.expect("ffn_act_fn", {"name": "silu"}, None)
    mlp.expect("moe_normalize_expert_weights", 1.0, None)
    size = mlp.integer("ffn_hidden_size", 3584)
    kv_heads, theta = attention.integer("kv_n_heads", 1), attention.number("rope_theta", 10_000.0)
    # Again, as transformers writes them.
    fields.expect("num_key_value_heads", kv_heads, None)
    fields.expect("rope_parameters", None, {"rope_type": "default", "rope_theta": theta})
    config = ModelConfig(
        family="dbrx",
        **{
            **common,
            "num_kv_heads": kv_heads,
            "rope": RopeConfig(theta=theta),
            "mlp_size": size,
        },
        norm="layer",
        qkv_clip=attention.number("clip_qkv") if clip is not None else None,
        num_experts=mlp.integer("moe_num_experts", 4),
        experts_per_token=mlp.integer("moe_top_k", 1),
        expert_size=size,
        router_normalise=mlp.get("moe_normalize_expert_weights", 1.0) is not None,
    )
    attention.finish()
    mlp.finish()
    return config


_BLOCK = "transformer.blocks.{}"

DBRX = Family(
    _config,
    {
        "embed.weight": Source(("transformer.wte.weight",), transforms.whole),
        **norm_rows("layers.{}.attention_norm", f"{_BLOCK}.norm_attn_norm.norm_1"),
        "layers.{}.attention.qkv": Source(
            (f"{_BLOCK}.norm_attn_norm.attn.Wqkv.weight",), joined.joined(transforms.fused_qkv)
        ),
        "layers.{}.attention.out": Source((f"{_BLOCK}.norm_attn_norm.attn.out_proj.weight",), transforms.attention_out),
        **norm_rows("layers.{}.mlp_norm", f"{_BLOCK}.norm_attn_norm.norm_2"),
        "layers.{}.mlp.router": Source((f"{_BLOCK}.ffn.router.layer.weight",), transforms.transposed),
        "layers.{}.mlp.expert_gate_up": Source(
            (f"{_BLOCK}.ffn.experts.mlp.w1", f"{_BLOCK}.ffn.experts.mlp.v1"), joined.flat_gate_up
        ),
        "layers.{}.mlp.expert_down": Source((f"{_BLOCK}.ffn.experts.mlp.w2",), joined.flat_down),
        **norm_rows("final_norm", "transformer.norm_f"),
        "head.weight": Source(("lm_head.weight",), transforms.transposed),
    },
)
