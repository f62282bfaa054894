"""Linear attention in steps and in chunks, and the convolution before it, against loops over tokens in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.recurrence import CHUNK, convolve, step
from jaxinfer.models.recurrent import recur, recurrent_inputs
from pallas_kernels.target import CPU

HEADS, SHARED, KEY, VALUE, SLOTS = 2, 2, 8, 6, 5
COUNTS = (70, 1, 0, 2 * CHUNK + 3, CHUNK)
"""Tokens of each sequence; one is padding."""
IN_SLOTS = (3, 0, SLOTS, 2, 1)
FRESH = (False, False, True, True, False)
PADDING = 9
START = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
TOKENS = int(START[-1]) + PADDING
POSITIONS = np.zeros(TOKENS, np.int32)
for _start, _count, _fresh in zip(START, COUNTS, FRESH, strict=False):
    POSITIONS[_start : _start + _count] = np.arange(_count) + (0 if _fresh else 5)
SEQUENCE = np.concatenate([np.repeat(np.arange(len(COUNTS)), COUNTS), np.full(PADDING, len(COUNTS) - 1)])


def loop(memory, q, k, v, decay, strength):
    """One head of one sequence, token by token, in float64."""
    memory, outs = memory.astype(np.float64), []
    for t in range(len(q)):
        memory = memory * np.exp(decay[t])
        u = v[t] if strength is None else strength[t] * (v[t] - k[t] @ memory)
        memory = memory + np.outer(k[t], u)
        outs.append(q[t] @ memory)
    return np.array(outs), memory


def random_tokens(seed=0):
    """Keys that are much alike, so that the system to solve is far from the identity."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(TOKENS, HEADS, KEY)).astype(np.float32) for _ in range(2))
    k = k * 0.3 + 1.0
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(TOKENS, HEADS, SHARED, VALUE)).astype(np.float32)
    decay = -rng.exponential(size=(TOKENS, HEADS, SHARED)).astype(np.float32) * np.float32([[[0.01, 2.0]]])
    strength = rng.uniform(0.5, 1.0, size=(TOKENS, HEADS, SHARED)).astype(np.float32)
    memory = rng.normal(size=(SLOTS, HEADS, SHARED, KEY, VALUE)).astype(np.float32)
    return memory, q, k, v, decay, strength


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["one by one", "in chunks"])
@pytest.mark.parametrize("delta_rule", [True, False])
def test_many_tokens_are_the_loop_over_them_and_touch_no_other_memory(delta_rule, dtype):
    memory, q, k, v, decay, strength = random_tokens()
    memory[4] = np.nan  # of nobody here
    memory[2] = np.nan  # of the sequence that starts anew

    @jax.jit
    def run(memory, *tokens):
        where = map(jnp.asarray, (IN_SLOTS, POSITIONS, START, SEQUENCE))
        inputs = recurrent_inputs(*where, decode=False, target=CPU)
        return recur(memory, *tokens, inputs, dtype)

    out, after = map(np.array, run(memory, q, k, v, decay, strength if delta_rule else None))
    assert np.isfinite(out).all()
    for b, (count, slot, fresh) in enumerate(zip(COUNTS, IN_SLOTS, FRESH, strict=True)):
        if not count:
            continue
        at = slice(START[b], START[b + 1])
        for h, s in np.ndindex(HEADS, SHARED):
            before = np.zeros((KEY, VALUE)) if fresh else memory[slot, h, s]
            b_t = strength[at, h, s] if delta_rule else None
            want, last = loop(before, q[at, h], k[at, h], v[at, h, s], decay[at, h, s], b_t)
            np.testing.assert_allclose(out[at, h, s], want, atol=2e-5, rtol=2e-5)
            np.testing.assert_allclose(after[slot, h, s], last, atol=2e-5, rtol=2e-5)
    np.testing.assert_array_equal(after[4], memory[4])


@pytest.mark.parametrize("delta_rule", [True, False])
def test_a_step_is_one_turn_of_the_loop(delta_rule):
    memory, q, k, v, decay, strength = random_tokens(1)
    q, k, v, decay, strength = (x[:SLOTS] for x in (q, k, v, decay, strength))
    out, after = jax.jit(step)(memory, q, k, v, decay, strength if delta_rule else None)
    for b, h, s in np.ndindex(SLOTS, HEADS, SHARED):
        b_t = strength[b : b + 1, h, s] if delta_rule else None
        want, last = loop(memory[b, h, s], *(x[b : b + 1, h] for x in (q, k)), v[[b], h, s], decay[[b], h, s], b_t)
        np.testing.assert_allclose(out[b, h, s], want[0], atol=1e-5)
        np.testing.assert_allclose(after[b, h, s], last, atol=1e-5)


def test_the_convolution_takes_what_came_before_and_hands_on_what_comes_next():
    rng, channels, width = np.random.default_rng(2), 3, 4
    x, weight, before = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((TOKENS, HEADS, channels), (HEADS, channels, width), (len(COUNTS), HEADS, width - 1, channels))
    )
    out, after = map(np.array, jax.jit(convolve)(x, weight, before, START, SEQUENCE))
    for b, count in enumerate(COUNTS):
        line = np.concatenate([before[b].swapaxes(0, 1), x[START[b] : START[b + 1]]])  # [time, heads, channels]
        np.testing.assert_array_equal(after[b], line[count:].swapaxes(0, 1))
        for t in range(count):
            want = np.einsum("thc,hct->hc", line[t : t + width], weight)
            np.testing.assert_allclose(out[START[b] + t], want, atol=1e-5)
