"""Rotary tables against the formulas, written out pair by pair, and against what they are for."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.models.rope import cos_sin, inverse_frequencies


def plain(theta, head_dim):
    return [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]


def llama3(rope, head_dim):
    """By wavelength, as Llama 3.1 describes it: short ones stay, long ones stretch, between them a blend."""
    longest, shortest = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    result = []
    for frequency in plain(rope.theta, head_dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < shortest:
            result.append(frequency)
        elif wavelength > longest:
            result.append(frequency / rope.factor)
        else:
            smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            result.append((1 - smooth) * frequency / rope.factor + smooth * frequency)
    return result


def yarn(rope, head_dim):
    """Peng et al. 2023: the pair that turns r times over the trained length L has theta^(-2d/D) = 2 pi r / L."""

    def pair(turns):
        return head_dim / 2 * math.log(rope.original_max_position / (2 * math.pi * turns), rope.theta)

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    result = []
    for number, frequency in enumerate(plain(rope.theta, head_dim)):
        stretched = min(1.0, max(0.0, (number - low) / (high - low)))
        result.append(frequency * (1 - stretched) + frequency / rope.factor * stretched)
    return result


YARN = RopeConfig(theta=10_000.0, kind="yarn", factor=8.0, original_max_position=512, attention_factor=1.2)
CASES = [
    (RopeConfig(theta=10_000.0), 64, lambda rope, dim: plain(rope.theta, dim)),
    (RopeConfig(theta=500.0), 10, lambda rope, dim: plain(rope.theta, dim)),
    (RopeConfig(kind="linear", factor=4.0), 32, lambda rope, dim: [f / 4 for f in plain(rope.theta, dim)]),
    (RopeConfig(500_000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0), 128, llama3),
    (RopeConfig(10_000.0, "llama3", 32.0, 64, low_freq_factor=2.0, high_freq_factor=3.5), 16, llama3),
    (YARN, 64, yarn),
    (RopeConfig(150_000.0, "yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False), 64, yarn),
    (RopeConfig(10_000.0, "yarn", 4.0, 32, beta_fast=24.0, beta_slow=2.0), 16, yarn),
    # Slow pairs still turn often within the trained length: the ramp ends past the last pair, at head_dim at most.
    (RopeConfig(100.0, "yarn", 4.0, 4096), 16, yarn),
    (RopeConfig(10.0, "yarn", 4.0, 4096, beta_fast=300.0), 16, yarn),
]


@pytest.mark.parametrize(("rope", "head_dim", "formula"), CASES)
def test_inverse_frequencies(rope, head_dim, formula):
    frequencies = inverse_frequencies(rope, head_dim)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, formula(rope, head_dim), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", [3, 4, 5, 6])
def test_stretching_leaves_the_fastest_pair_and_divides_the_slowest(case):
    rope, head_dim, _ = CASES[case]
    ratio = inverse_frequencies(rope, head_dim) / np.asarray(plain(rope.theta, head_dim))
    assert ratio[0] == pytest.approx(1.0, rel=1e-6)
    assert ratio[-1] == pytest.approx(1 / rope.factor, rel=1e-6)
    assert (np.diff(ratio) <= 1e-7).all()
    assert ((ratio > 1.01 / rope.factor) & (ratio < 0.99)).any()


def test_yarn_whose_ramp_is_a_step_divides_by_no_zero():
    rope = RopeConfig(10_000.0, "yarn", 4.0, 4, beta_fast=32.0, beta_slow=1.0)
    ratio = inverse_frequencies(rope, 16) / np.asarray(plain(10_000.0, 16))
    np.testing.assert_allclose(ratio, [1.0] + [0.25] * 7, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rope", "head_dim", "formula"), CASES)
def test_cos_and_sin_of_position_times_frequency(rope, head_dim, formula):
    positions = [0, 1, 2, 63, 500]
    cos, sin = cos_sin(rope, head_dim, jnp.asarray(positions, jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    assert cos.shape == sin.shape == (5, head_dim // 2)
    angles = np.outer(positions, formula(rope, head_dim))
    np.testing.assert_allclose(cos, np.cos(angles) * rope.attention_factor, rtol=0, atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * rope.attention_factor, rtol=0, atol=1e-4)


def test_attention_factor_scales_both():
    cos, sin = cos_sin(YARN, 64, jnp.arange(100))
    np.testing.assert_allclose(np.asarray(cos) ** 2 + np.asarray(sin) ** 2, 1.44, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_trained_length_is_needed(kind):
    with pytest.raises(ValueError, match=f"rope kind '{kind}' needs original_max_position, the length"):
        inverse_frequencies(RopeConfig(kind=kind, factor=2.0), 16)


def test_longrope_divides_each_frequency_by_a_factor_of_its_own():
    short, far = (1.0, 1.5, 2.0), (1.0, 4.0, 9.0)
    rope = RopeConfig(kind="longrope", short_factors=short, long_factors=far, original_max_position=16)
    plain = inverse_frequencies(RopeConfig(), 6)
    np.testing.assert_allclose(inverse_frequencies(rope, 6), plain / far, rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(dataclasses.replace(rope, long=False), 6), plain / short, rtol=1e-6)


def test_only_the_first_dimensions_have_a_turn():
    cos, sin = cos_sin(RopeConfig(dims=4), 10, jnp.arange(5))
    whole, _ = cos_sin(RopeConfig(), 4, jnp.arange(5))
    assert cos.shape == sin.shape == (5, 2)
    np.testing.assert_array_equal(cos, whole)
