"""From logits to the next ids, and to the log-probabilities a caller asked for. Stateless: no key is carried.

A row's randomness comes from (seed, choice, position) alone, so its ids do not depend on its neighbours in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.sampling_params import MAX_LOGPROBS

POSITION_BITS = 22
"""Positions below 4,194,304 and choices below 1,024 (`MAX_CHOICES`) share the second word of a random key."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "choice",
        "position",
        "suppressed",
        "any_random",
        "any_filter",
        "any_logprobs",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class SamplingInputs:
    """Sampling parameters of a batch, one row per sequence."""

    temperature: jax.Array
    """[batch] f32; 0: greedy."""
    top_k: jax.Array
    """[batch] i32; below 1: all."""
    top_p: jax.Array
    """[batch] f32"""
    min_p: jax.Array
    """[batch] f32"""
    seed: jax.Array
    """[batch] u32"""
    choice: jax.Array
    """[batch] i32: which of the prompt's outputs."""
    position: jax.Array
    """[batch] i32: where in its sequence the new token stands."""
    suppressed: jax.Array
    """[batch, MAX_SUPPRESSED] i32: ids that may not be chosen; past the vocabulary: none."""
    any_random: jax.Array | bool
    """Whether any row has a temperature above 0; the flags spare a batch the work that none of its rows asks for.
    Known while tracing (a bool) or on the device only (an array)."""
    any_filter: jax.Array | bool
    """Whether any row uses min_p, top_k or top_p."""
    any_logprobs: jax.Array | bool
    """Whether any row wants log-probabilities."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["chosen", "rank", "top", "top_ids"], meta_fields=[])
@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of one id per row, and of the most likely ones, under the raw distribution."""

    chosen: jax.Array
    """[rows] f32"""
    rank: jax.Array
    """[rows] i32: 1 for the most likely id."""
    top: jax.Array
    """[rows, MAX_LOGPROBS] f32, falling."""
    top_ids: jax.Array
    """[rows, MAX_LOGPROBS] i32"""


def sample(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """The next id of each row: suppress, temperature, min_p, top_k, top_p, draw. logits: [batch, vocab] f32."""
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, inputs.suppressed].set(-jnp.inf, mode="drop")
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        warm = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)
        # From the largest logit on down: a tiny temperature then overflows to −inf, never to a tie at +inf.
        scaled = (logits - logits.max(-1, keepdims=True)) / warm[:, None]
        scaled = when(inputs.any_filter, lambda: _filter(scaled, inputs), lambda: scaled)
        noise = jax.vmap(lambda *key: jax.random.gumbel(_key(*key), logits.shape[1:]))(
            inputs.seed, inputs.choice, inputs.position
        )
        return jnp.where(inputs.temperature > 0, jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32), greedy)

    return when(inputs.any_random, draw, lambda: greedy)


def when[T](flag: jax.Array | bool, then: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """A branch: taken while tracing if the flag is known there, else on the device."""
    if isinstance(flag, bool):
        return then() if flag else otherwise()
    return jax.lax.cond(flag, then, otherwise)


def _key(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
    """A Threefry key of its own for every (seed, choice, position): see POSITION_BITS."""
    place = (choice.astype(jnp.uint32) << POSITION_BITS) | position.astype(jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([seed, place]), impl="threefry2x32")


def _filter(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """−inf where min_p, top_k or top_p leaves a token out; top_p counts what the other two left."""
    vocab = logits.shape[1]
    ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    keep = ordered >= ordered[:, :1] + jnp.log(inputs.min_p)[:, None]
    top_k = jnp.where(inputs.top_k < 1, vocab, inputs.top_k)
    keep &= jnp.arange(vocab) < top_k[:, None]
    probabilities = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    keep &= (before < inputs.top_p[:, None]) | (inputs.top_p[:, None] >= 1.0)
    last = jnp.take_along_axis(ordered, keep.sum(-1, keepdims=True) - 1, axis=-1)
    return jnp.where(logits >= last, logits, -jnp.inf)


def row_logprobs(logprobs: jax.Array, ids: jax.Array) -> RowLogprobs:
    """logprobs: [rows, vocab] f32; ids: [rows] i32. A vocabulary below MAX_LOGPROBS fills up with −inf."""
    chosen = jnp.take_along_axis(logprobs, ids[:, None], axis=-1)
    top, top_ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - top.shape[1]))
    return RowLogprobs(
        chosen=chosen[:, 0],
        rank=1 + (logprobs > chosen).sum(-1, dtype=jnp.int32),
        top=jnp.pad(top, missing, constant_values=-jnp.inf),
        top_ids=jnp.pad(top_ids, missing),
    )


def no_logprobs(rows: int) -> RowLogprobs:
    """The same shapes, for a batch that asked for none."""
    return RowLogprobs(
        chosen=jnp.zeros(rows),
        rank=jnp.zeros(rows, jnp.int32),
        top=jnp.zeros((rows, MAX_LOGPROBS)),
        top_ids=jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
    )
