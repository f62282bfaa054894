"""Snowflake Arctic: experts beside an MLP, which takes what attention leaves; the experts take what attention took."""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import LLAMA_TABLE, common_fields, norm_rows
from convert.families.fields import Fields
from convert.families.moe import expert_rows
from convert.families.table import Family, Source
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS)
    layers, every = range(common["num_layers"]), fields.integer("moe_layer_frequency", 2)
    residual = fields.boolean("parallel_attn_mlp_res", False)
    fields.expect("use_residual", residual)  # says the same
    fields.expect("sliding_window", None)
    fields.expect("quantization", None)
    # Of training, of other code's batches, and which layers that code quantizes.
    fields.ignore(["moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity", "moe_token_dropping"])
    fields.ignore(["router_aux_loss_coef", "enable_expert_tensor_parallelism", "max_sequence_length", "enc_index"])
    return ModelConfig(
        family="arctic",
        **common,
        num_experts=fields.integer("num_local_experts", 8),
        experts_per_token=fields.integer("num_experts_per_tok", 1),
        expert_size=common["mlp_size"],
        dense_layers=tuple(layer for layer in layers if (layer + 1) % every != 0),
        dense_residual_size=common["hidden_size"] if residual else 0,
    )


_BLOCK, _DENSE = "model.layers.{}.block_sparse_moe", "model.layers.{}.residual_mlp"

ARCTIC = Family(
    _config,
    {
        **LLAMA_TABLE,
        **expert_rows(_BLOCK, "w1", "w3", "w2"),
        "layers.{}.mlp.gate_up": Source(
            (f"{_BLOCK}.mlp.w1.weight", f"{_BLOCK}.mlp.w3.weight"), transforms.fused_gate_up
        ),
        "layers.{}.mlp.down": Source((f"{_BLOCK}.mlp.w2.weight",), transforms.transposed),
        **norm_rows("layers.{}.dense_norm", "model.layers.{}.residual_layernorm"),
        "layers.{}.dense.gate_up": Source((f"{_DENSE}.w1.weight", f"{_DENSE}.w3.weight"), transforms.fused_gate_up),
        "layers.{}.dense.down": Source((f"{_DENSE}.w2.weight",), transforms.transposed),
    },
)
