"""Building blocks: projections, the MLP, the vocabulary's two ends."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.models.lora import added, lora_of, with_lora
from jaxinfer.models.norms import enter, folded, leave
from jaxinfer.models.observe import observe
from jaxinfer.parameters import Tree, dense_residual_parameters, head_parameter, mlp_parameters
from jaxinfer.weights import partition_specs, row_lengths
from meshes import partition_spec
from pallas_kernels.formats import QuantizedArray, QuantizedRows
from pallas_kernels.fused_mlp import activated, down, gate_up
from pallas_kernels.norm_matmul import norm_gate_up
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.target import Target

type Weight = jax.Array | QuantizedArray


def linear(
    x: jax.Array | QuantizedRows,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    contract: int = 1,
    target: Target,
) -> jax.Array:
    """The last `contract` dimensions of x against the first of weight: [tokens, *inputs] · [*inputs, *outputs].

    bias: [*outputs] is added. Every projection goes through here, or through `fused_mlp`, within shard_map: a weight is
    this device's own part; a quantized one is [inputs, *outputs]. float32 stays float32 on hardware that would rather
    round it to TF32.
    """
    if isinstance(weight, QuantizedArray):
        rows = x if isinstance(x, QuantizedRows) else x.reshape(-1, weight.inputs)
        out = quant_matmul(rows, weight, target=target)
        return out if bias is None else out + bias
    assert not isinstance(x, QuantizedRows)
    inputs, outputs = math.prod(weight.shape[:contract]), weight.shape[contract:]
    flat = weight.reshape(inputs, math.prod(outputs))
    bias = None if bias is None else bias.reshape(-1)
    return down(x.reshape(-1, inputs), flat, bias=bias, target=target).reshape(-1, *outputs)


def summed(part: Callable[[jax.Array | None], jax.Array], bias: jax.Array | None, shards: int) -> jax.Array:
    """A projection whose inputs are spread over `shards` devices, within shard_map; part: from a bias to this device's
    part of the sum. One all-reduce, and the bias once.
    """
    if shards == 1:
        return part(bias)
    total = jax.lax.psum(part(None), "tensor")
    return total if bias is None else total + bias


def _mlp(
    x: jax.Array,
    delta: jax.Array | None,
    norms: Tree,
    weights: Tree,
    *,
    config: ModelConfig,
    shards: int,
    target: Target,
    name: str = "mlp",
) -> tuple[jax.Array, jax.Array | None]:
    """name: of these weights in their layer."""
    first = "gate_up" if config.gated_mlp else "up"
    into, bias = None if "lora" in weights else weights[first], weights.get(f"{first}_bias")
    options: dict[str, Any] = {"activation": config.activation, "gated": config.gated_mlp, "target": target}
    norm = folded(delta, norms, config, target, into)
    if norm is not None:
        x, hidden = norm_gate_up(x, norm, weights[first], bias, **options)
    else:
        x, inner = enter(x, delta, norms, config, target, into)
        observe(f"{name}.{first}", inner)
        if "lora" in weights:
            product = added(linear(inner, weights[first], target=target), inner, weights, first)
            hidden = activated(product, bias, config.activation, config.gated_mlp)
        else:
            hidden = gate_up(inner, weights[first], bias, **options)
    observe(f"{name}.down", hidden)
    project = functools.partial(down, hidden, weights["down"], None, target=target)
    part = with_lora(project, hidden, weights, "down")
    return leave(x, summed(part, weights.get("down_bias"), shards), norms, config, target)


class Mlp(nnx.Module):
    """down(activation(gate(x)) · up(x)), gate and up being one projection; or down(activation(up(x)))."""

    parameters = staticmethod(mlp_parameters)
    compute: Callable[..., tuple[jax.Array, jax.Array | None]] = staticmethod(_mlp)
    """What each shard does."""

    def __init__(self, config: ModelConfig, weights: Tree, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        for name in self.parameters(config):
            setattr(self, name, nnx.Param(weights[name]))
        self.lora = lora_of(weights)

    def __call__(
        self, x: jax.Array, delta: jax.Array | None, norms: Tree, target: Target, places: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """x + delta, and mlp(norm(x + delta)), the next delta; each [tokens, embed]. norms: as in `norms.enter`.

        places: [tokens] i32, of the adapters. Each shard computes its part of the hidden layer; one all-reduce.
        """
        parameters = self.parameters(self.config)
        weights = {name: value(getattr(self, name)) for name in parameters}
        specs, whole = jax.tree.map(partition_specs, parameters, weights), partition_spec(())
        if self.lora is not None and places is not None:
            weights["lora"], specs["lora"] = self.lora.operands(parameters, places)
        shard = jax.shard_map(
            functools.partial(self.compute, config=self.config, shards=self.mesh.shape["tensor"], target=target),
            mesh=self.mesh,
            in_specs=(whole, whole, whole, specs),
            out_specs=whole,
            check_vma=False,
        )
        return shard(x, delta, norms, weights)


class DenseResidual(Mlp):
    """The MLP beside a layer's experts."""

    parameters = staticmethod(dense_residual_parameters)
    compute = staticmethod(functools.partial(_mlp, name="dense"))


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
        self.bias = nnx.Param(weights["bias"]) if config.head_bias else None

    def logits(self, x: jax.Array, target: Target) -> jax.Array:
        """x: [rows, embed]; returns [rows, vocab] float32, each shard with its part of the vocabulary."""
        logits = self._product(x, target)
        if self.config.head_norm:
            logits = logits / row_lengths(value(self.weight))
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)

    def _product(self, x: jax.Array, target: Target) -> jax.Array:
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


class Projection(nnx.Module):
    """A plain product, whole on every device: [inputs, outputs]."""

    def __init__(self, weights: Tree):
        self.weight = nnx.Param(weights["weight"])

    def __call__(self, x: jax.Array) -> jax.Array:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.matmul(x, self.weight[...], precision=precision)


def value(parameter: nnx.Param | None) -> Any:
    """The array, or QuantizedArray, of a parameter; None of one that this model lacks."""
    return None if parameter is None else parameter.get_value()
