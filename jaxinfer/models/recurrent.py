"""Layers that keep a state per sequence in place of keys and values: Gated DeltaNet (Yang et al. 2024)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import Attention
from jaxinfer.models.layers import linear, summed
from jaxinfer.models.norms import enter, leave
from jaxinfer.models.observe import observe
from jaxinfer.models.recurrence import Chunks, chunked, convolve, cut, one_by_one, step
from jaxinfer.parameters import Tree, recurrent_parameters
from pallas_kernels.target import Target

L2_EPS = 1e-6
"""Of the lengths of queries and keys, whatever that of the norms is."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["memory", "inputs"], meta_fields=[])
@dataclass(frozen=True)
class RecurrentState:
    """What one recurrent layer keeps of every sequence that runs, by slot. Either half is f32."""

    memory: Any
    """[slots, key_heads, shared, key_dim, value_dim]: of each value head; `shared` of them share a key head."""
    inputs: Any
    """[slots, key_heads, conv_width − 1, channels]: what the convolution took last, the newest last; None where there
    is no convolution."""


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["target"],
    data_fields=["slots", "fresh", "query_start", "sequence", "chunks", "places"],
)
@dataclass(frozen=True)
class RecurrentInputs:
    """Whose tokens a step's are: the same for every recurrent layer."""

    slots: jax.Array
    """[batch] i32: where each sequence's state is; past the last slot: it is dropped."""
    fresh: jax.Array
    """[batch] bool: whether the sequence starts here, from an empty state whatever its slot holds."""
    query_start: jax.Array
    """[batch + 1] i32: where each sequence's tokens start."""
    sequence: jax.Array
    """[tokens] i32: the sequence of each token; of padding, any."""
    chunks: Chunks | None
    """None where every sequence has exactly one token, so that row b is sequence b."""
    target: Target
    places: jax.Array | None = None
    """As in `AttentionInputs`."""


def recurrent_inputs(
    slots: jax.Array, positions: jax.Array, query_start: jax.Array, sequence: jax.Array, decode: bool, target: Target
) -> RecurrentInputs:
    """slots, query_start: as in a batch; positions, sequence: [tokens] i32."""
    # A sequence that was preempted starts again as well, from position 0.
    fresh = (positions if decode else positions.at[query_start[:-1]].get(mode="clip")) == 0
    chunks = None if decode else cut(query_start, slots, fresh, sequence)
    return RecurrentInputs(slots, fresh, query_start, sequence, chunks, target)


def abstract_state(config: ModelConfig, slots: int, sharding: Any = None) -> RecurrentState:
    """Shapes of one layer's. sharding: of both, by slot and head."""
    c, heads = config, config.recurrent_key_heads
    shared = c.recurrent_value_heads // heads
    memory = (slots, heads, shared, c.recurrent_key_dim, c.recurrent_value_dim)
    inputs = (slots, heads, c.conv_width - 1, c.recurrent_channels)
    make = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=sharding)
    return RecurrentState(make(memory), make(inputs) if c.conv_width else None)


def _gated_delta(
    x: jax.Array,
    delta: jax.Array | None,
    norms: Tree,
    weights: Tree,
    state: RecurrentState,
    inputs: RecurrentInputs,
    *,
    config: ModelConfig,
    shards: int,
) -> tuple[jax.Array, jax.Array | None, RecurrentState]:
    x, inner = enter(x, delta, norms, config, inputs.target)
    observe("attention.qkvz", inner)
    qkvz = linear(inner, weights["qkvz"], target=inputs.target)
    mixed, gate = jnp.split(qkvz, [config.recurrent_channels], axis=-1)
    strength, time = jnp.moveaxis(linear(inner, weights["ba"], target=inputs.target).astype(jnp.float32), 2, 0)
    mixed, taken = _convolve(mixed, weights["conv"], state, inputs)
    key_dim, value_shape = config.recurrent_key_dim, (*strength.shape, config.recurrent_value_dim)
    q, k, v = jnp.split(jax.nn.silu(mixed), [key_dim, 2 * key_dim], axis=-1)
    wide = {name: weights[name].astype(jnp.float32) for name in ("log_decay", "step_bias")}
    log_decay = -jnp.exp(wide["log_decay"]) * jax.nn.softplus(time + wide["step_bias"])
    q, k, v = _unit(q) * key_dim**-0.5, _unit(k), v.reshape(value_shape)
    out, memory = recur(state.memory, q, k, v, log_decay, jax.nn.sigmoid(strength), inputs, x.dtype)
    out = _gated_norm(out, gate.reshape(value_shape), weights["value_norm"]["scale"], config.norm_eps).astype(x.dtype)
    observe("attention.heads_out", out)
    project = functools.partial(linear, out, weights["heads_out"], contract=3, target=inputs.target)
    return *leave(x, summed(project, None, shards), norms, config, inputs.target), RecurrentState(memory, taken)


def _convolve(
    x: jax.Array, weight: jax.Array, state: RecurrentState, inputs: RecurrentInputs
) -> tuple[jax.Array, jax.Array]:
    """The convolution of x [tokens, heads, channels], f32, and the state's inputs after it."""
    before = jnp.where(inputs.fresh[:, None, None, None], 0.0, state.inputs.at[inputs.slots].get(mode="clip"))
    out, after = convolve(x, weight, before, inputs.query_start, inputs.sequence)
    return out, state.inputs.at[inputs.slots].set(after, mode="drop")


def recur(
    memory: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array | None,
    inputs: RecurrentInputs,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """What tokens read, as in `recurrence.one_by_one`, and the memories after them. dtype: of the activations."""
    if inputs.chunks is not None and dtype == jnp.float32:  # whose results depend on no neighbour
        rows, sequence = jnp.arange(q.shape[0]), inputs.sequence
        padding = rows >= inputs.query_start[-1]
        slots = jnp.where(padding, memory.shape[0], inputs.slots[sequence])
        fresh = padding | (inputs.fresh[sequence] & (rows == inputs.query_start[sequence]))
        return one_by_one(memory, q, k, v, log_decay, strength, slots, fresh)
    if inputs.chunks is not None:
        return chunked(memory, q, k, v, log_decay, strength, inputs.chunks)
    before = jnp.where(inputs.fresh[:, None, None, None, None], 0.0, memory.at[inputs.slots].get(mode="clip"))
    out, after = step(before, q, k, v, log_decay, strength)
    return out, memory.at[inputs.slots].set(after, mode="drop")


def _unit(x: jax.Array) -> jax.Array:
    """x over its length along the last dimension."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def _gated_norm(x: jax.Array, gate: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over each head, then times silu(gate). x: [tokens, heads, shared, value_dim] f32, as the result."""
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))


class Recurrent(Attention):
    """In the place of `Attention`: each shard runs its own key heads; one all-reduce."""

    parameters = staticmethod(recurrent_parameters)
    cache_axes = ("slots", "heads")

    def options(self) -> dict[str, Any]:
        return {}


class GatedDelta(Recurrent):
    """Gated DeltaNet."""

    compute = staticmethod(_gated_delta)
