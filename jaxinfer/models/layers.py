"""Building blocks: projections, RMSNorm, the gated MLP, the vocabulary's two ends."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Tree, head_parameter, mlp_parameters
from jaxinfer.weights import partition_specs
from meshes import partition_spec
from pallas_kernels.formats import QuantizedArray
from pallas_kernels.fused_mlp import down, gate_up
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.target import Target

type Weight = jax.Array | QuantizedArray


def linear(
    x: jax.Array,
    weight: Weight,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    contract: int = 1,
    target: Target,
) -> jax.Array:
    """The last `contract` dimensions of x against the first of weight: [tokens, *inputs] · [*inputs, *outputs].

    bias: [*outputs] and residual: [tokens, *outputs] are added. Every projection goes through here, or through
    `fused_mlp`, within shard_map: a weight is this device's own part; a quantized one is [inputs, *outputs]. float32
    stays float32 on hardware that would rather round it to TF32.
    """
    if isinstance(weight, QuantizedArray):
        out = quant_matmul(x.reshape(-1, weight.inputs), weight, target=target)
        out = out if bias is None else out + bias
        return out if residual is None else residual + out
    inputs, outputs = math.prod(weight.shape[:contract]), weight.shape[contract:]
    flat = weight.reshape(inputs, math.prod(outputs))
    bias = None if bias is None else bias.reshape(-1)
    residual = None if residual is None else residual.reshape(-1, flat.shape[1])
    return down(x.reshape(-1, inputs), flat, residual, bias, target=target).reshape(-1, *outputs)


class RMSNorm(nnx.Module):
    """The scale of a normalisation; the halves of a layer normalise within their shard_map."""

    def __init__(self, eps: float, weights: Tree):
        self.eps = eps
        self.scale = nnx.Param(weights["scale"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [rows, embed], anywhere: in plain JAX."""
        return rms_norm(x, self.scale[...], eps=self.eps, implementation="xla")


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) · up(x)); gate and up are one projection."""

    def __init__(self, config: ModelConfig, weights: Tree, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.gate_up = nnx.Param(weights["gate_up"])
        self.down = nnx.Param(weights["down"])
        self.gate_up_bias = nnx.Param(weights["gate_up_bias"]) if config.mlp_bias else None
        self.down_bias = nnx.Param(weights["down_bias"]) if config.mlp_bias else None

    def __call__(self, x: jax.Array, norm: RMSNorm, target: Target) -> jax.Array:
        """x + mlp(norm(x)), [tokens, embed]. Each shard computes its part of the hidden layer; one all-reduce."""
        parameters = mlp_parameters(self.config)
        weights = {name: value(getattr(self, name)) for name in parameters}
        whole = partition_spec(())
        part = functools.partial(
            _mlp, eps=norm.eps, activation=self.config.activation, shards=self.mesh.shape["tensor"], target=target
        )
        shard = jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=(whole, whole, jax.tree.map(partition_specs, parameters, weights)),
            out_specs=whole,
            check_vma=False,
        )
        return shard(x, value(norm.scale), weights)


def _mlp(
    x: jax.Array, norm: jax.Array, weights: Tree, *, eps: float, activation: Any, shards: int, target: Target
) -> jax.Array:
    normed = rms_norm(x, norm, eps=eps, target=target)
    hidden = gate_up(normed, weights["gate_up"], weights.get("gate_up_bias"), activation=activation, target=target)
    if shards == 1:
        return down(hidden, weights["down"], x, weights.get("down_bias"), target=target)
    out = x + jax.lax.psum(down(hidden, weights["down"], target=target), "tensor")
    return out + weights["down_bias"] if "down_bias" in weights else out


class Embedding(nnx.Module):
    """Token ids to vectors, and, where the head is tied, vectors to logits."""

    def __init__(self, weights: Tree):
        self.weight = nnx.Param(weights["weight"])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...].at[tokens].get(mode="promise_in_bounds")

    def logits(self, x: jax.Array) -> jax.Array:
        """x: [rows, embed]; returns [rows, vocab] float32."""
        rows = x.shape[0]
        # XLA's CPU code takes one row against a [vocab, embed] table on one core, two rows on all of them.
        x = jnp.broadcast_to(x, (2, x.shape[1])) if rows == 1 else x
        return _logits(x, self.weight[...], vocab_axis=0)[:rows]


class Head(nnx.Module):
    """The output projection of an untied model: [embed, vocab]."""

    def __init__(self, config: ModelConfig, weights: Tree, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.weight = nnx.Param(weights["weight"])

    def logits(self, x: jax.Array, target: Target) -> jax.Array:
        """x: [rows, embed]; returns [rows, vocab] float32, each shard with its part of the vocabulary."""
        weight = value(self.weight)
        if not isinstance(weight, QuantizedArray):
            return _logits(x, weight, vocab_axis=1)
        shard = jax.shard_map(
            functools.partial(quant_matmul, out_dtype=jnp.float32, target=target),
            mesh=self.mesh,
            in_specs=(partition_spec(()), partition_specs(head_parameter(self.config), weight)),
            out_specs=partition_spec((None, "vocab")),
            check_vma=False,
        )
        return shard(x, weight)


def _logits(x: jax.Array, table: jax.Array, vocab_axis: int) -> jax.Array:
    contract = (((1,), (1 - vocab_axis,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, table, contract, precision=precision, preferred_element_type=jnp.float32)


def value(parameter: nnx.Param | None) -> Any:
    """The array, or QuantizedArray, of a parameter; None of one that this model lacks."""
    return None if parameter is None else parameter.get_value()
