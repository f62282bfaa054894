"""Llama 4's text model: attention in chunks, every few layers without positions instead, and experts.

Queries and keys of the layers with positions are brought to one length; in the others queries grow with the position.
"""

from __future__ import annotations

from typing import Any

from convert import joined, transforms
from convert.families.decoder import common_fields
from convert.families.fields import Fields
from convert.families.glm import INTERLEAVED_TABLE
from convert.families.table import Family, Source, Table
from convert.families.wrapped import inside, text_config
from jaxinfer.config import ModelConfig, QueryScaling

_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS, {"intermediate_size": "intermediate_size_mlp"})
    layers = range(common["num_layers"])
    bias = fields.boolean("attention_bias", False)
    without_rope = _layers_without_rope(fields, layers)
    fields.ignore(["for_llm_compressor", "output_router_logits"])
    fields.ignore(["router_aux_loss_coef", "router_jitter_noise"])
    rope = common["rope"]
    if rope.attention_factor != 1.0:
        raise ValueError(f"{fields.where}: RoPE that scales queries and keys before their norm is not supported")
    return ModelConfig(
        family="llama4_text",
        **common,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_with_rope=fields.boolean("use_qk_norm", True),
        no_rope_layers=without_rope,
        query_scaling=_query_scaling(fields),
        chunks=_chunks(fields, layers, without_rope),
        **_experts(fields, layers),
    )


def _layers_without_rope(fields: Fields, layers: range) -> tuple[int, ...]:
    interval = fields.integer("no_rope_layer_interval", 4)
    # Despite the name, 1 where there is RoPE.
    said = None if fields.get("no_rope_layers") == [] else fields.per_layer("no_rope_layers", len(layers))
    has_rope = said or [(layer + 1) % interval != 0 for layer in layers]
    return tuple(layer for layer in layers if not has_rope[layer])


def _query_scaling(fields: Fields) -> QueryScaling | None:
    tuned = fields.choice("attn_temperature_tuning", fields.get("attn_temperature_tuning", True), _TUNING)
    beta, length = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    return QueryScaling(beta, length, offset=1, without_rope=True) if tuned else None


def _chunks(fields: Fields, layers: range, without_rope: tuple[int, ...]) -> tuple[int | None, ...]:
    size = fields.get("attention_chunk_size", 8192)
    size = None if size is None else fields.integer("attention_chunk_size", size)
    kinds = fields.per_layer("layer_types", len(layers))
    if kinds is None:
        chunked = [size is not None and layer not in without_rope for layer in layers]
    else:
        chunked = [fields.choice("layer_types", kind, _LAYER_KINDS) for kind in kinds]
    if any(chunked) and size is None:
        raise ValueError(f"{fields.where}: 'layer_types' has chunked layers, but 'attention_chunk_size' says none")
    return tuple(size if layer else None for layer in chunked) if any(chunked) else ()


def _experts(fields: Fields, layers: range) -> dict[str, Any]:
    """None of it where no layer has any, as in MobileLLM-R1, whatever their sizes are said to be."""
    names = ("interleave_moe_layer_step", "moe_layers", "num_local_experts", "num_experts_per_tok", "intermediate_size")
    routed: Any = fields.integers("moe_layers")
    if routed is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        routed = layers[step - 1 :: step]
    fields.ignore(names)
    if not routed:
        return {}
    size = fields.integer("intermediate_size", 8192)
    return {
        "num_experts": fields.integer("num_local_experts", 16),
        "experts_per_token": fields.integer("num_experts_per_tok", 1),
        "expert_size": size,
        "shared_expert_size": size,
        "shared_expert_gate": False,
        "dense_layers": tuple(layer for layer in layers if layer not in routed),
        "router_score": "sigmoid",
        "router_normalise": False,
        "router_scales_input": True,
    }


_TUNING: dict[Any, bool] = {True: True, False: False, 4: True}
"""The first release says 4."""
_LAYER_KINDS = {"full_attention": False, "chunked_attention": True}

_BLOCK = "model.layers.{}.feed_forward"
_MLP = tuple(f"{_BLOCK}.{name}_proj.weight" for name in ("gate", "up"))
_SHARED = tuple(f"{_BLOCK}.shared_expert.{name}_proj.weight" for name in ("gate", "up"))
_TABLE: Table = {
    **INTERLEAVED_TABLE,
    "layers.{}.mlp.gate_up": Source(_MLP, transforms.fused_gate_up),
    "layers.{}.mlp.down": Source((f"{_BLOCK}.down_proj.weight",), transforms.transposed),
    "layers.{}.mlp.router": Source((f"{_BLOCK}.router.weight",), transforms.transposed),
    "layers.{}.mlp.expert_gate_up": Source((f"{_BLOCK}.experts.gate_up_proj",), joined.experts_by_input),
    "layers.{}.mlp.expert_down": Source((f"{_BLOCK}.experts.down_proj",), joined.experts_by_input),
    "layers.{}.mlp.shared_gate_up": Source(_SHARED, transforms.fused_gate_up),
    "layers.{}.mlp.shared_down": Source((f"{_BLOCK}.shared_expert.down_proj.weight",), transforms.transposed),
}


def _with_images(fields: Fields) -> ModelConfig:
    fields.ignore(["boi_token_index", "eoi_token_index", "image_token_index", "image_token_id"])
    return text_config(fields, "llama4", {"llama4_text": _config}, "llama4_text")


LLAMA4 = Family(_config, _TABLE)
LLAMA4_WITH_IMAGES = Family(
    _with_images, inside("language_model", _TABLE), ignored=(r"(vision_model|multi_modal_projector)\..*",)
)
