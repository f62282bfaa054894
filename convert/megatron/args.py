"""Megatron's arguments, as training saved them beside the weights → ModelConfig.

There are hundreds, most of them about training. Those that change what a model computes are read here, or must be off;
one that is on and only sounds as if it did (`_SUSPECT`) is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from convert.families.fields import Fields
from convert.torch_pickle import Opaque
from jaxinfer.config import ModelConfig, RopeConfig

_READ = """
    hidden_size num_attention_heads num_layers kv_channels ffn_hidden_size max_position_embeddings num_query_groups
    group_query_attention num_key_value_heads swiglu squared_relu openai_gelu bias_gelu_fusion add_bias_linear
    add_qkv_bias normalization norm_epsilon layernorm_epsilon apply_layernorm_1p layernorm_zero_centered_gamma
    qk_layernorm embed_layernorm position_embedding_type use_rotary_position_embeddings add_position_embedding
    rotary_percent rotary_base rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor rope_type
    softmax_type vocab_size untie_embeddings_and_output_weights num_experts
"""
_OFF = """
    apply_residual_connection_post_layernorm attention_output_gate multi_latent_attention experimental_attention_variant
    linear_attention_freq hybrid_layer_pattern hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio
    is_hybrid_model heterogeneous_layers_config_path heterogeneous_block_specs mtp_num_layers qk_l2_norm quick_geglu
    glu_activation glu_linear_offset activation_func_clamp_value window_size window_attn_skip_freq no_rope_freq
    rotary_interleaved softmax_scale use_mup enable_mhc_connections retro_add_retriever mrope_section spec
    moe_latent_size dsa_indexer_n_heads
"""
_SUSPECT = re.compile(
    r"(use_|apply_|no_)?(rotary|rope|yarn|softmax|attention|norm|position|activation_func|glu|qk|window|alibi|embed|logit|"
    r"residual|query_key)\w*|\w+_(multiplier|mult|glu|gelu|relu|norm|layernorm)"
)
_HARMLESS = re.compile(
    r"attention_(backend|dropout|softmax_in_fp32)|embedding_(init_method(_std)?|path|weights_in_fp32)|"
    r"logits?_(dtype|(save|load)_\w+)|rotary_scaling_factor|(apply|no)_query_key_layer_scaling|\w*log_\w+|mup_\w+|"
    r"(no_)?(persist|memory_efficient)_layer_norm|qk_(clip\w*|head_dim|pos_emb_head_dim)|(apply|no)_rope_fusion|"
    r"head_lr_mult|apply_wd_\w+|dsa_\w+|use_fused_\w+|activation_func_fp8\w+"
)
_POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
"""Of the enumeration that BigScience's Megatron-DeepSpeed has for them."""


def model_config(args: Mapping[str, Any], vocab_rows: int, version: float, where: str) -> ModelConfig:
    """vocab_rows: of the embedding, padded ones too. version: of the checkpoint.

    Raises ValueError, naming the argument, for one that changes the model and is not handled.
    """
    fields = Fields({name: value for name, value in args.items() if _tells(name, value)}, where)
    for name in _OFF.split():
        fields.expect(name, None, False, 0, 0.0)
    fields.expect("num_experts", None, 0, 1, [1])
    fields.expect("rope_type", "rope", None)
    fields.expect("softmax_type", "vanilla")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim, mlp = fields.integer("kv_channels", hidden // heads), fields.integer("ffn_hidden_size", 4 * hidden)
    grouped, groups = fields.boolean("group_query_attention", False), fields.integer("num_query_groups", heads)
    kv_heads = fields.integer("num_key_value_heads", groups if grouped else heads)  # DeepSpeed's name
    if version < 2 and kv_heads != heads:
        raise ValueError(f"{where}: grouped queries in checkpoint version {version}, which has no order for them")
    biases, max_position = fields.boolean("add_bias_linear", True), fields.integer("max_position_embeddings")
    position = _position(fields)
    norms = {"LayerNorm": "layer", "layernorm": "layer", "RMSNorm": "rms", "rmsnorm": "rms"}
    norm = fields.choice("normalization", fields.get("normalization", "LayerNorm"), norms)
    qk_norm = fields.boolean("qk_layernorm", False)
    if qk_norm and norm != "rms":
        raise ValueError(f"{where}: 'qk_layernorm' with LayerNorm is not supported; only with RMSNorm")
    offset = fields.boolean("apply_layernorm_1p", False) | fields.boolean("layernorm_zero_centered_gamma", False)
    epsilon = fields.number("layernorm_epsilon", 1e-5)
    vocab = fields.integer("vocab_size", vocab_rows)
    if vocab > vocab_rows:
        raise ValueError(f"{where}: 'vocab_size' is {vocab}, and the embedding has {vocab_rows} rows")
    config = ModelConfig(
        family="megatron",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=fields.integer("num_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp,
        max_position=max_position,
        rope=_rope(fields, head_dim) if position == "rope" else None,
        learned_positions=max_position if position == "learned_absolute" else 0,
        alibi_max_bias=8.0 if position == "alibi" else None,
        norm=norm,
        norm_bias=norm == "layer",
        norm_offset=float(offset),
        norm_eps=fields.number("norm_epsilon", epsilon),
        qk_norm=qk_norm,
        embed_norm=fields.boolean("embed_layernorm", False),
        **_mlp(fields, biases),
        qkv_bias=fields.boolean("add_qkv_bias", False) or biases,
        out_bias=biases,
        mlp_bias=biases,
        tied_head=not fields.boolean("untie_embeddings_and_output_weights", False),
    )
    fields.ignore(_READ.split())  # what only others of them make matter
    fields.finish()
    return config


def _tells(name: str, value: Any) -> bool:
    """Whether an argument is to be looked at."""
    if value is None:
        return False
    known = name in {*_READ.split(), *_OFF.split()}
    return known or (bool(value) and bool(_SUSPECT.fullmatch(name)) and not _HARMLESS.fullmatch(name))


def _mlp(fields: Fields, biases: bool) -> dict[str, Any]:
    """GELU is exact, but its fusion with the bias is the approximation by tanh."""
    fused = fields.boolean("bias_gelu_fusion", True) and biases
    fused |= fields.boolean("openai_gelu", False)
    if fields.boolean("swiglu", False):
        return {"gated_mlp": True, "activation": "silu"}
    squared = fields.boolean("squared_relu", False)
    return {"gated_mlp": False, "activation": "relu2" if squared else "gelu_tanh" if fused else "gelu"}


def _position(fields: Fields) -> str:
    kind = fields.get("position_embedding_type", "learned_absolute")
    if isinstance(kind, Opaque) and kind.arguments:
        kind = _POSITIONS.get(kind.arguments[0], kind.arguments[0])
    rotary, added = (
        fields.boolean("use_rotary_position_embeddings", False),
        fields.boolean("add_position_embedding", True),
    )
    if rotary:
        return "rope"
    if kind == "learned_absolute" and not added:
        return "none"
    kinds = ("learned_absolute", "rope", "alibi", "none")
    return fields.choice("position_embedding_type", kind, {kind: kind for kind in kinds})


def _rope(fields: Fields, head_dim: int) -> RopeConfig:
    theta, percent = fields.number("rotary_base", 10_000), fields.number("rotary_percent", 1.0)
    dims = int(head_dim * percent)
    if dims % 2:
        raise ValueError(f"{fields.where}: 'rotary_percent' turns {dims} dimensions of {head_dim}; they must be even")
    turned = None if dims >= head_dim else dims
    name = "rotary_seq_len_interpolation_factor"
    stretched, scaled = fields.get(name) is not None, fields.boolean("use_rope_scaling", False)
    if stretched and scaled:
        raise ValueError(f"{fields.where}: 'use_rope_scaling' and '{name}' at once are not supported")
    if stretched:
        return RopeConfig(theta, "linear", factor=fields.number(name), dims=turned)
    if scaled:  # Megatron has all but the factor as constants
        factor = fields.number("rope_scaling_factor", 8.0)
        return RopeConfig(theta, "llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0, dims=turned)
    return RopeConfig(theta, dims=turned)
