"""The sampler on logits written by hand, against filters written out one after another in numpy."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine import sampler
from jaxinfer.engine.sampler import SamplingInputs
from jaxinfer.sampling_params import MAX_CHOICES, MAX_LOGPROBS, MAX_SUPPRESSED

sample = jax.jit(sampler.sample)
row_logprobs = jax.jit(sampler.row_logprobs)

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "choice": 0, "position": 1}
DTYPES = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint32}


def inputs(*rows, suppressed=()):
    """One SamplingInputs of a dict of changed fields per row; suppressed: {row: ids}."""
    fields = {
        name: np.asarray([row.get(name, default) for row in rows], DTYPES.get(name, np.int32))
        for name, default in DEFAULTS.items()
    }
    ids = np.full((len(rows), MAX_SUPPRESSED), np.iinfo(np.int32).max, np.int32)
    for row, held_back in dict(suppressed).items():
        ids[row, : len(held_back)] = held_back
    return SamplingInputs(
        **fields,
        suppressed=ids,
        any_random=np.asarray(any(fields["temperature"] > 0)),
        any_filter=np.asarray(any((fields["min_p"] > 0) | (fields["top_k"] > 0) | (fields["top_p"] < 1))),
        any_logprobs=np.asarray(False),
    )


def draws(logits, count=8000, *, suppressed=(), **params):
    """`count` ids drawn from one row of logits, by as many seeds. Counts key executables, so there are few."""
    rows = inputs(params)
    many = {name: np.repeat(getattr(rows, name), count, 0) for name in DEFAULTS} | {
        "seed": np.arange(count, dtype=np.uint32),
        "suppressed": np.repeat(inputs(params, suppressed={0: suppressed}).suppressed, count, 0),
    }
    batch = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    return np.asarray(sample(batch, dataclasses.replace(rows, **many)))


def distribution(logits, *, suppressed=(), temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """What is drawn from: suppress, temperature, min_p, top_k, top_p, each on what the one before it left."""
    logits = np.asarray(logits, np.float64).copy()
    logits[list(suppressed)] = -np.inf
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0.0
    falling = np.argsort(-p, kind="stable")
    if top_k >= 1:
        p[falling[top_k:]] = 0.0
    p /= p.sum()
    reached = 0.0
    for token_id in falling:
        if reached >= top_p:
            p[token_id] = 0.0
        reached += p[token_id]
    return p / p.sum()


def logits_of(*probabilities):
    return np.log(np.asarray(probabilities, np.float64)).astype(np.float32)


LOGITS = logits_of(0.04, 0.28, 0.11, 0.22, 0.02, 0.16, 0.08, 0.03, 0.06)


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = np.asarray([[1, 3, 3, 0], [2, 2, 2, 2], [-5, -4, -9, -4], [0, 0, 0, 7]], np.float32)
    rows = inputs(*[{"temperature": 0.0, "seed": row} for row in range(4)])
    np.testing.assert_array_equal(sample(logits, rows), [1, 0, 1, 3])


def test_greedy_ignores_filters_and_random_neighbours():
    logits = np.tile(LOGITS, (3, 1))
    rows = inputs({"temperature": 0.0, "top_k": 3, "min_p": 0.9}, {"temperature": 5.0, "seed": 4}, {"temperature": 0.0})
    ids = np.asarray(sample(logits, rows))
    assert ids.dtype == np.int32
    assert ids[0] == ids[2] == 1


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": -1},
        {"top_k": 100},
        {"top_p": 0.2},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.7},
        {"min_p": 0.3, "top_k": 2},
        {"min_p": 0.25, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.4, "top_k": 6, "top_p": 0.8},
        {"temperature": 0.7, "min_p": 0.1, "top_k": 4, "top_p": 0.9, "suppressed": (1, 5)},
        {"suppressed": (1, 3, 5, 0)},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_filtered_distribution(params):
    """Pearson's statistic of 8,000 draws; with at most 8 degrees of freedom it passes 30 once in 5,000 times."""
    want = 8000 * distribution(LOGITS, **params)
    got = np.bincount(draws(LOGITS, **params), minlength=len(LOGITS))
    np.testing.assert_array_equal(got > 0, want > 0)
    possible = want > 0
    assert ((got - want)[possible] ** 2 / want[possible]).sum() < 30


@pytest.mark.parametrize(
    ("probabilities", "params", "kept"),
    [
        # top_k leaves 0.4 and 0.3, which are 0.57 and 0.43 of what is left: the first alone reaches 0.5.
        ((0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, {0}),
        # min_p leaves 0.5, 0.3, 0.15; the first two are 0.84 of them, and 0.8 of all.
        ((0.5, 0.3, 0.15, 0.05), {"min_p": 0.2, "top_p": 0.82}, {0, 1}),
        # At temperature 2 the square roots count: 0.38, 0.31, 0.20, 0.12, and 0.12 is over 0.3 of 0.38.
        ((0.5, 0.33, 0.14, 0.05), {"temperature": 2.0, "min_p": 0.3}, {0, 1, 2, 3}),
        ((0.5, 0.33, 0.14, 0.05), {"temperature": 1.0, "min_p": 0.3}, {0, 1}),
        # Suppressed before min_p: the largest that is left sets the bar.
        ((0.8, 0.1, 0.06, 0.04), {"suppressed": (0,), "min_p": 0.5}, {1, 2}),
        ((0.8, 0.1, 0.06, 0.04), {"suppressed": (0,), "top_k": 1}, {1}),
        # The token that reaches top_p stays.
        ((0.3, 0.25, 0.25, 0.2), {"top_p": 0.31}, {0, 1, 2}),
        ((0.3, 0.25, 0.24, 0.21), {"top_p": 0.31}, {0, 1}),
        ((0.3, 0.25, 0.24, 0.21), {"top_p": 0.29}, {0}),
    ],
)
def test_what_is_left_after_the_filters(probabilities, params, kept):
    """Equal tokens at the edge stay together: nothing tells which of them to drop."""
    assert set(draws(logits_of(*probabilities), **params).tolist()) == kept


def test_a_row_that_filters_nothing_keeps_the_tail_next_to_one_that_does():
    """In float32 the likely tokens alone sum to 1 here."""
    logits = np.asarray([[0.0, -20.0, -30.0, -40.0]] * 2, np.float32)
    kept = np.isfinite(sampler._filter(logits, inputs({}, {"top_p": 0.9})))
    np.testing.assert_array_equal(kept, [[True] * 4, [True, False, False, False]])


@pytest.mark.parametrize("temperature", [2e-38, 1e-30, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature):
    """Logits divided by it overflow float32; the largest must still win."""
    assert set(draws([-3.0, 499.0, 500.0, 2.0], temperature=temperature).tolist()) == {2}
    assert set(draws([-700.0, -500.0, -499.0, -600.0], temperature=temperature).tolist()) == {2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_ids_are_never_chosen(temperature):
    """Each row has its own, up to as many as fit; rows without any are not touched."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 40)).astype(np.float32)
    suppressed = {row: rng.permutation(40)[: row % (MAX_SUPPRESSED + 1)].tolist() for row in range(64)}
    rows = inputs(*[{"temperature": temperature, "seed": row} for row in range(64)], suppressed=suppressed)
    ids = np.asarray(sample(logits, rows))
    free = np.asarray(sample(logits, dataclasses.replace(rows, suppressed=inputs(*[{}] * 64).suppressed)))
    for row, held_back in suppressed.items():
        assert ids[row] not in held_back
        if free[row] not in held_back:
            assert ids[row] == free[row]
    assert sum(free[row] in held_back for row, held_back in suppressed.items()) > 10


def test_a_row_draws_the_same_alone_and_among_any_neighbours():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, 30)).astype(np.float32)
    rows = [
        {"seed": 7, "position": 3},
        {"seed": 7, "position": 3, "choice": 1},
        {"seed": 2**32 - 1, "position": 90, "top_k": 5},
        {"seed": 1, "temperature": 0.0},
        {"seed": 5, "position": 12, "top_p": 0.7, "temperature": 2.0},
        {"seed": 5, "position": 12, "min_p": 0.2},
    ]
    together = np.asarray(sample(logits, inputs(*rows)))
    alone = [int(sample(logits[i : i + 1], inputs(rows[i]))[0]) for i in range(6)]
    np.testing.assert_array_equal(together, alone)
    order = rng.permutation(6)
    np.testing.assert_array_equal(sample(logits[order], inputs(*[rows[i] for i in order])), together[order])
    others = rng.standard_normal((6, 30)).astype(np.float32)
    others[2] = logits[2]
    strangers = [{"seed": 100 + i, "temperature": 3.0} for i in range(6)]
    strangers[2] = rows[2]
    assert sample(others, inputs(*strangers))[2] == together[2]


def test_seeds_choices_and_positions_all_draw_their_own():
    """From 1,000 equal tokens: two draws of different keys agree once in a thousand times."""
    keys = list(itertools.product((0, 1, 2**32 - 1), (0, 1, MAX_CHOICES - 1), (0, 1, 2, 2**22 - 1)))
    rows = [dict(zip(("seed", "choice", "position"), key, strict=True)) for key in keys]
    ids = np.asarray(sample(np.zeros((len(keys), 1000), np.float32), inputs(*rows)))
    assert len(set(ids.tolist())) >= len(keys) - 3


def test_steps_of_one_request_are_independent():
    """Pairs of draws at neighbouring positions fall on all 16 pairs of 4 equal tokens alike."""
    rows = [{"seed": 3, "position": position} for position in range(8000)]
    ids = np.asarray(sample(np.zeros((8000, 4), np.float32), inputs(*rows)))
    got = np.bincount(4 * ids[:-1] + ids[1:], minlength=16)
    assert ((got - 7999 / 16) ** 2 / (7999 / 16)).sum() < 45


def test_row_logprobs_lists_ranks_and_the_most_likely():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((5, 50)).astype(np.float32)
    ids = np.asarray([0, 49, 7, 23, int(logits[4].argmax())], np.int32)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = row_logprobs(jax.nn.log_softmax(logits), ids)
    falling = np.argsort(-logits, axis=-1)
    np.testing.assert_array_equal(rows.top_ids, falling[:, :MAX_LOGPROBS])
    np.testing.assert_allclose(rows.top, np.take_along_axis(logprobs, falling, -1)[:, :MAX_LOGPROBS], atol=1e-5, rtol=0)
    np.testing.assert_allclose(rows.chosen, logprobs[np.arange(5), ids], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(rows.rank, [1 + list(falling[row]).index(token) for row, token in enumerate(ids)])
    assert rows.rank[4] == 1


def test_equal_logprobs_share_a_rank():
    logprobs = jnp.log(jnp.asarray([[0.1, 0.3, 0.3, 0.1, 0.2]] * 5))
    rows = row_logprobs(logprobs, np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(rows.rank, [4, 1, 1, 4, 3])
    np.testing.assert_array_equal(rows.top_ids[0, :5], [1, 2, 4, 0, 3])


def test_a_vocabulary_below_twenty_fills_up_with_nothing():
    logits = np.asarray([[0.0, 2.0, 1.0]], np.float32)
    rows = row_logprobs(jax.nn.log_softmax(logits), np.asarray([2], np.int32))
    none = sampler.no_logprobs(1)
    for name in ("chosen", "rank", "top", "top_ids"):
        assert getattr(rows, name).shape == getattr(none, name).shape
        assert getattr(rows, name).dtype == getattr(none, name).dtype
    assert rows.top.shape == (1, MAX_LOGPROBS)
    np.testing.assert_array_equal(rows.top_ids[0, :3], [1, 2, 0])
    assert np.isneginf(np.asarray(rows.top[0, 3:])).all()
    np.testing.assert_allclose(np.exp(np.asarray(rows.top)).sum(), 1.0, rtol=1e-6)
