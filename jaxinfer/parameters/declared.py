"""Every weight of a model, declared once: path → shape, logical axes, initialiser. No modules, no arrays."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from jaxinfer.config import ModelConfig
from jaxinfer.parameters.tree import Tree, flatten


@dataclass(frozen=True)
class Parameter:
    """One weight: its shape, the logical axis of each dimension (None: never sharded) and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initialiser: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1
    """Inputs summed into one output: a normal weight starts with standard deviation fan_in ** -0.5."""
    contract: int = 0
    """Dimensions that a projection sums over, the first after `batch`; 0: no projection, so never quantized."""
    batch: int = 0
    """1: the first dimension counts experts, each with a projection of its own."""

    @property
    def inputs(self) -> int:
        """Of a projection: its input dimensions flattened."""
        return math.prod(self.shape[self.batch : self.batch + self.contract])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of a quantized projection: [*batch, *outputs, inputs]."""
        return (*self.shape[: self.batch], *self.shape[self.batch + self.contract :], self.inputs)

    @property
    def one(self) -> Parameter:
        """That of one expert."""
        return dataclasses.replace(self, shape=self.shape[1:], axes=self.axes[1:], batch=0)


def declare(config: ModelConfig) -> Tree:
    """All weights of `config` as a nested dict of Parameter."""
    c, norm = config, norm_parameters(config)
    layers = {layer: _layer_parameters(c, layer) for layer in range(c.num_layers)}
    tree: Tree = {
        "embed": {"weight": Parameter((c.vocab_rows, c.embed_size), ("vocab", "embed"), fan_in=c.embed_size)},
        "layers": layers,
    }
    if c.embed_size != c.hidden_size:
        for name, inputs, outputs in (("in", c.embed_size, c.hidden_size), ("out", c.hidden_size, c.embed_size)):
            shape = (inputs, outputs)
            tree[f"project_{name}"] = {"weight": Parameter(shape, ("embed", None), fan_in=inputs)}
    if c.learned_positions:
        shape = (c.learned_positions, c.hidden_size)
        tree["positions"] = {"weight": Parameter(shape, (None, "embed"), fan_in=c.hidden_size)}
    if c.token_types:
        shape = (c.token_types, c.hidden_size)
        tree["token_types"] = {"weight": Parameter(shape, (None, "embed"), fan_in=c.hidden_size)}
    if c.embed_norm:
        tree["embed_norm"] = norm
    if c.final_norm:
        tree["final_norm"] = norm
    if not (c.tied_head or c.headless):
        tree["head"] = {"weight": head_parameter(c)}
        if c.head_bias:
            tree["head"]["bias"] = Parameter((c.vocab_rows,), ("vocab",), "zeros")
    return tree


def _layer_parameters(c: ModelConfig, layer: int) -> Tree:
    attention = recurrent_parameters(c) if c.is_recurrent(layer) else attention_parameters(c)
    mlp = moe_parameters(c) if c.routes(layer) else mlp_parameters(c)
    tree: Tree = {}
    for half, parameters in (("attention", attention), ("mlp", mlp)):
        tree |= {f"{name}_norm": norm_parameters(c) for name in norm_names(c) if name.startswith(half)}
        tree[half] = parameters
    if c.routes(layer) and c.dense_residual_size:
        tree |= {"dense_norm": norm_parameters(c), "dense": dense_residual_parameters(c)}
    return tree


def norm_names(c: ModelConfig) -> tuple[str, ...]:
    """Of one layer: those before its halves, or after the sum, and those of a half's output."""
    before = ("attention",) if c.shared_norm else ("attention", "mlp")
    after = ("attention_output", "mlp_output")
    return {"output": after, "sandwich": (*before, *after)}.get(c.norm_placement, before)


def norm_parameters(c: ModelConfig) -> Tree:
    """Of one norm over the embedding; what has neither scale nor bias is empty."""
    tree: Tree = {}
    if c.norm_scale:
        tree["scale"] = Parameter((c.hidden_size,), ("embed",), "zeros" if c.norm_offset else "ones")
    if c.norm_bias:
        tree["bias"] = Parameter((c.hidden_size,), ("embed",), "zeros")
    return tree


def head_parameter(c: ModelConfig) -> Parameter:
    """Of an untied model."""
    return Parameter((c.embed_size, c.vocab_rows), ("embed", "vocab"), fan_in=c.embed_size, contract=1)


def attention_parameters(c: ModelConfig) -> Tree:
    """Of one layer. qkv holds, per kv head, its query heads, then its key, its value, and the gates of its query heads
    where there are gates: a shard is a plain slice.
    """
    if c.kv_lora_rank:
        return latent_parameters(c)
    heads = (c.num_kv_heads, c.q_per_kv + 2 + (c.q_per_kv if c.attention_gate else 0), c.head_dim)
    tree: Tree = {
        "qkv": Parameter(
            (c.hidden_size, *heads), ("embed", "kv_heads", None, "head_dim"), fan_in=c.hidden_size, contract=1
        ),
        "out": Parameter(
            (c.num_kv_heads, c.q_per_kv, c.head_dim, c.hidden_size),
            ("kv_heads", None, "head_dim", "embed"),
            fan_in=c.num_heads * c.head_dim,
            contract=3,
        ),
    }
    if c.qkv_bias:
        tree["qkv_bias"] = Parameter(heads, ("kv_heads", None, "head_dim"), "zeros")
    if c.out_bias:
        tree["out_bias"] = Parameter((c.hidden_size,), ("embed",), "zeros")
    if c.sinks:
        tree["sinks"] = Parameter((c.num_kv_heads, c.q_per_kv), ("kv_heads", None))
    if c.qk_norm:
        start: Literal["zeros", "ones"] = "zeros" if c.norm_offset else "ones"
        one = c.qk_norm_span == "head"
        q, k = ((), ()) if one else ((c.num_kv_heads, c.q_per_kv), (c.num_kv_heads,))
        q_axes, k_axes = ((), ()) if one else (("kv_heads", None), ("kv_heads",))
        tree["q_norm"] = {"scale": Parameter((*q, c.head_dim), (*q_axes, "head_dim"), start)}
        tree["k_norm"] = {"scale": Parameter((*k, c.head_dim), (*k_axes, "head_dim"), start)}
    return tree


def latent_parameters(c: ModelConfig) -> Tree:
    """Of one layer whose heads share a latent. kv_b gives, per head, its keys' and its values' rows of it."""
    embed, latent, heads, query_inputs = c.hidden_size, c.kv_lora_rank, c.num_heads, c.q_lora_rank or c.hidden_size
    query, keys_values = c.qk_nope_dim + c.qk_rope_dim, c.qk_nope_dim + c.v_head_dim
    q_axis = None if c.q_lora_rank else "embed"
    tree: Tree = {
        "q_b": Parameter((query_inputs, heads, query), (q_axis, "heads", None), fan_in=query_inputs, contract=1),
        "kv_a": Parameter((embed, latent + c.qk_rope_dim), ("embed", None), fan_in=embed, contract=1),
        "kv_a_norm": {"scale": Parameter((latent,), (None,), "ones")},
        "kv_b": Parameter((heads, keys_values, latent), ("heads", None, None), fan_in=latent),
        "heads_out": Parameter(
            (heads, c.v_head_dim, embed), ("heads", None, "embed"), fan_in=heads * c.v_head_dim, contract=2
        ),
    }
    if c.q_lora_rank:
        tree["q_a"] = Parameter((embed, c.q_lora_rank), ("embed", None), fan_in=embed, contract=1)
        tree["q_a_norm"] = {"scale": Parameter((c.q_lora_rank,), (None,), "ones")}
    return tree


def recurrent_parameters(c: ModelConfig) -> Tree:
    """Of one recurrent layer, by key head, so that a shard is a plain slice.

    qkvz: of each key head the query, the key, the values of its value heads and their output gates.
    """
    embed, heads, value_dim = c.hidden_size, c.recurrent_key_heads, c.recurrent_value_dim
    shared = c.recurrent_value_heads // heads
    tree: Tree = {
        "qkvz": Parameter(
            (embed, heads, c.recurrent_channels + shared * value_dim),
            ("embed", "heads", None),
            fan_in=embed,
            contract=1,
        ),
        "heads_out": Parameter(
            (heads, shared, value_dim, embed),
            ("heads", None, None, "embed"),
            fan_in=c.recurrent_value_heads * value_dim,
            contract=3,
        ),
    }
    if c.recurrence == "lightning":
        return tree | {"value_norm": {"scale": Parameter((heads, shared, value_dim), ("heads", None, None), "ones")}}
    return tree | {
        "value_norm": {"scale": Parameter((value_dim,), (None,), "ones")},
        # beta, and the step that decay is multiplied by, of each value head
        "ba": Parameter((embed, heads, 2, shared), ("embed", "heads", None, None), fan_in=embed),
        "conv": Parameter((heads, c.recurrent_channels, c.conv_width), ("heads", None, None), fan_in=c.conv_width),
        "log_decay": Parameter((heads, shared), ("heads", None), "zeros"),
        "step_bias": Parameter((heads, shared), ("heads", None), "ones"),
    }


def mlp_parameters(c: ModelConfig) -> Tree:
    """Of one layer: gate_up, or up alone, and down."""
    parts = (2,) if c.gated_mlp else ()
    axes = (None, "mlp") if c.gated_mlp else ("mlp",)
    first = "gate_up" if c.gated_mlp else "up"
    tree: Tree = {
        first: Parameter((c.hidden_size, *parts, c.mlp_size), ("embed", *axes), fan_in=c.hidden_size, contract=1),
        "down": Parameter((c.mlp_size, c.hidden_size), ("mlp", "embed"), fan_in=c.mlp_size, contract=1),
    }
    if c.mlp_bias:
        tree[f"{first}_bias"] = Parameter((*parts, c.mlp_size), axes, "zeros")
        tree["down_bias"] = Parameter((c.hidden_size,), ("embed",), "zeros")
    return tree


def dense_residual_parameters(c: ModelConfig) -> Tree:
    """Of the MLP beside one layer's experts."""
    return mlp_parameters(dataclasses.replace(c, mlp_size=c.dense_residual_size))


def moe_parameters(c: ModelConfig) -> Tree:
    """Of one layer with experts."""
    embed, experts, size, shared = c.hidden_size, c.num_experts, c.expert_size, c.shared_expert_size
    tree: Tree = {
        "router": Parameter((embed, experts), ("embed", None), fan_in=embed),
        "expert_gate_up": Parameter(
            (experts, embed, 2, size), ("experts", "embed", None, "mlp"), fan_in=embed, contract=1, batch=1
        ),
        "expert_down": Parameter((experts, size, embed), ("experts", "mlp", "embed"), fan_in=size, contract=1, batch=1),
    }
    if c.router_correction_bias:
        tree["router_correction_bias"] = Parameter((experts,), (None,), "zeros")
    if c.expert_bias:
        tree["router_bias"] = Parameter((experts,), (None,), "zeros")
        tree["expert_gate_up_bias"] = Parameter((experts, 2, size), ("experts", None, "mlp"), "zeros")
        tree["expert_down_bias"] = Parameter((experts, embed), ("experts", "embed"), "zeros")
    if shared:
        tree["shared_gate_up"] = Parameter((embed, 2, shared), ("embed", None, "mlp"), fan_in=embed, contract=1)
        tree["shared_down"] = Parameter((shared, embed), ("mlp", "embed"), fan_in=shared, contract=1)
    if shared and c.shared_expert_gate:
        tree["shared_router"] = Parameter((embed, 1), ("embed", None), fan_in=embed)
    return tree


def count(config: ModelConfig) -> int:
    """Number of weights."""
    return sum(math.prod(parameter.shape) for _, parameter in flatten(declare(config)))
