"""LoRA adapters beside the projections: several at once, each token with its own or none.

A projection's factors of all adapters are stacked: a [places, rank, *inputs], b [places, rank, *outputs], the scaling
in b. A token of place i gets (x · a[i]) · b[i] added (Hu et al. 2021), whatever the weight itself is stored in. All
places are multiplied, in two matmuls as thin as places · rank, and those that are not a token's own are set to zero in
between: a gather of each token's factors would move far more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.parameters import Parameter, Tree
from meshes import partition_spec


def factor_axes(parameter: Parameter) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of the stacked factors: where a mesh divides the outputs it divides b, where the inputs, a."""
    inputs, outputs = parameter.axes[: parameter.contract], parameter.axes[parameter.contract :]
    return {"a": (None, None, *inputs), "b": (None, None, *outputs)}


class Lora(nnx.Module):
    """The stacked factors of one half of a layer: `NAME_a` and `NAME_b` of each projection that takes adapters."""

    def __init__(self, weights: Tree):
        self.names = tuple(weights)
        for name, weight in weights.items():
            setattr(self, name, nnx.Param(weight))

    def operands(self, parameters: Tree, places: jax.Array) -> tuple[Tree, Tree]:
        """What `added` reads within shard_map, and its PartitionSpecs.

        parameters: of this half, as declared. places: [tokens] i32, −1 where a token has none.
        """
        axes = {f"{name}_{f}": axes for name in parameters for f, axes in _axes_of(parameters[name]).items()}
        values = {name: getattr(self, name).get_value() for name in self.names}
        specs = {name: partition_spec(axes[name]) for name in self.names}
        return {**values, "places": places}, {**specs, "places": partition_spec(())}


def _axes_of(parameter: Parameter | Tree) -> dict[str, tuple[str | None, ...]]:
    return factor_axes(parameter) if isinstance(parameter, Parameter) else {}


def lora_of(weights: Tree) -> Lora | None:
    """Of the weights of one half of a layer; None where there are no places for adapters."""
    return Lora(weights["lora"]) if "lora" in weights else None


def added(out: jax.Array, x: jax.Array, weights: Tree, name: str) -> jax.Array:
    """A projection's output [tokens, *outputs], with what the tokens' adapters add; within shard_map.

    x: what it was made of, [tokens, *inputs]. weights: of this half of a layer. Where inputs are spread over devices
    this is a part of the sum, as `out` is. Zero is added for a token without one: no neighbour changes its result.
    """
    if f"{name}_a" not in weights.get("lora", {}):
        return out
    lora = weights["lora"]
    a, b, places = lora[f"{name}_a"], lora[f"{name}_b"], lora["places"]
    count, rank, inputs = a.shape[0], a.shape[1], math.prod(a.shape[2:])
    low = _product(x.reshape(-1, inputs), a.reshape(count * rank, inputs), 1)
    own = places[:, None] == jnp.arange(count)
    low = jnp.where(own[:, :, None], low.reshape(-1, count, rank), 0).reshape(-1, count * rank).astype(x.dtype)
    delta = _product(low, b.reshape(count * rank, -1), 0)
    return (out.astype(jnp.float32) + delta.reshape(out.shape)).astype(out.dtype)


def with_lora(part: Callable[[jax.Array | None], jax.Array], x: jax.Array, weights: Tree, name: str) -> Callable:
    """`part`, for `layers.summed`, with what adapters add to each device's part."""
    return lambda bias: added(part(bias), x, weights, name)


def _product(x: jax.Array, factor: jax.Array, contract: int) -> jax.Array:
    """[tokens, n] f32: the last dimension of x against dimension `contract` of factor."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(x, factor, dims, precision=precision, preferred_element_type=jnp.float32)
