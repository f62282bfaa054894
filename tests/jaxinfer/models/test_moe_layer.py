"""Routing: which experts, with what weights, and that neighbours do not matter."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.moe import route
from tests.jaxinfer.models.test_norms import config, normal

CONFIG = config(num_experts=5, experts_per_token=2, expert_size=10)


def test_equal_scores_go_to_the_lower_number_whatever_the_batch():
    x, router = normal(7, 6), np.repeat(normal(6, 1), 5, axis=1)
    for rows in (1, 3, 7):
        experts, shares = route(jnp.asarray(x[:rows]), jnp.asarray(router), CONFIG)
        np.testing.assert_array_equal(experts, [[0, 1]] * rows)
        np.testing.assert_allclose(shares, 0.5, rtol=1e-6)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_largest_shares_and_what_they_sum_to(normalise, biased):
    x, router, bias = normal(7, 6), normal(6, 5), normal(5) * biased
    c = dataclasses.replace(CONFIG, router_normalise=normalise)
    experts, shares = route(jnp.asarray(x), jnp.asarray(router), c, bias=jnp.asarray(bias) if biased else None)
    exponents = np.exp(x @ router + bias)
    want = exponents / exponents.sum(-1, keepdims=True)
    order = np.argsort(-want, axis=-1)[:, :2]
    np.testing.assert_array_equal(experts, order)
    chosen = np.take_along_axis(want, order, axis=-1)
    np.testing.assert_allclose(shares, chosen / chosen.sum(-1, keepdims=True) if normalise else chosen, rtol=1e-5)


def test_a_router_in_low_precision_is_computed_in_float32():
    """Scores that bfloat16 could not tell apart: 256 and 257."""
    x, router = jnp.asarray([[16.0, 1.0]], jnp.bfloat16), jnp.asarray([[16.0, 16.0], [0.0, 1.0]], jnp.bfloat16)
    experts, _ = route(x, router, dataclasses.replace(CONFIG, num_experts=2, experts_per_token=1))
    assert experts.tolist() == [[1]]


@pytest.mark.parametrize("score", ["max", "top2"])
def test_experts_come_from_the_best_groups_by_corrected_scores_and_weigh_by_plain_ones(score):
    x, router, correction = normal(20, 6), normal(6, 8), normal(8)
    c = dataclasses.replace(
        CONFIG, num_experts=8, experts_per_token=3, router_score="sigmoid", router_scale=2.5, router_groups=4,
        router_top_groups=2, router_group_score=score,
    )  # fmt: skip
    experts, shares = route(jnp.asarray(x), jnp.asarray(router), c, correction=jnp.asarray(correction))
    plain = 1 / (1 + np.exp(-(x @ router)))
    corrected = plain + correction
    for token in range(20):
        pairs = corrected[token].reshape(4, 2)
        best = np.argsort(-(pairs.max(1) if score == "max" else pairs.sum(1)))[:2]
        allowed = [expert for expert in range(8) if expert // 2 in best]
        want = sorted(allowed, key=lambda expert: -corrected[token, expert])[:3]
        assert experts[token].tolist() == want
        chosen = plain[token, want]
        np.testing.assert_allclose(shares[token], 2.5 * chosen / chosen.sum(), rtol=1e-5)
