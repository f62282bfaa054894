"""Norms, and where they stand around a half of a layer."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models.layers import Mlp
from jaxinfer.models.norms import Norm, enter, folded, leave, normalise_heads
from jaxinfer.models.observe import observed
from pallas_kernels import choice
from pallas_kernels.formats import quantize
from pallas_kernels.target import CPU, Target


def config(**fields):
    sizes = {"vocab_size": 11, "hidden_size": 6, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3}
    options = {"mlp_size": 10, "max_position": 64, "rope": RopeConfig(), **fields}
    return ModelConfig(family="llama", **sizes, **options)


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def layer_norm(x, eps=1e-6):
    wide = x.astype(np.float64)
    wide = wide - wide.mean(-1, keepdims=True)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)


def rms(x, axis=-1, eps=1e-6):
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis, keepdims=True) + eps)


def test_rms_norm():
    x, scale = 3 * normal(4, 6), normal(6)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.5) * scale
    np.testing.assert_allclose(Norm(config(norm_eps=0.5), {"scale": jnp.asarray(scale)})(x), want, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_low_precision_is_computed_in_float32():
    """400² overflows float16; and the scale multiplies before the result is rounded."""
    x, scale = jnp.full((1, 8), 400.0, jnp.float16), jnp.asarray(normal(8), jnp.float16)
    out = Norm(config(), {"scale": scale})(x)
    assert out.dtype == jnp.float16
    np.testing.assert_array_equal(out[0], scale)

    x = jnp.asarray(normal(64, 6), jnp.bfloat16)
    scale = jnp.asarray(normal(6), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
    out = np.asarray(Norm(config(), {"scale": scale})(x), np.float64)
    np.testing.assert_allclose(out, want, rtol=2**-8 * 1.001, atol=0)


def test_layer_norm_with_what_it_has():
    x, scale, bias = 3 * normal(4, 6) + 1, normal(6), normal(7)[:6]
    for weights in ({}, {"scale": scale}, {"bias": bias}, {"scale": scale, "bias": bias}):
        want = layer_norm(x, 0.5) * weights.get("scale", 1.0) + weights.get("bias", 0.0)
        out = Norm(config(norm="layer", norm_eps=0.5), {name: jnp.asarray(w) for name, w in weights.items()})(x)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_offset_is_added_to_the_scale_in_float32(norm):
    """In bfloat16 1 + 2⁻¹⁰ would be 1."""
    x = jnp.asarray(normal(4, 6))
    weights = {"scale": jnp.full(6, 2.0**-10, jnp.bfloat16)}
    plain = {"rms": rms, "layer": layer_norm}[norm](np.asarray(x))
    out = Norm(config(norm=norm, norm_offset=1.0), weights)(x)
    np.testing.assert_allclose(out, plain * (1 + 2.0**-10), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement", ["pre", "post", "output", "sandwich"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_where_norms_stand_around_a_half(placement, norm):
    """Each placement's formula, with f(x) = x · matrix."""
    c = config(norm=norm, norm_placement=placement, residual_scale=0.5)
    x, delta, matrix = normal(4, 6), normal(5, 6)[:4], normal(6, 7)[:, :6]
    scales = {"norm": normal(6), "output_norm": normal(8)[:6]}
    used = {"pre": ["norm"], "post": ["norm"], "output": ["output_norm"], "sandwich": ["norm", "output_norm"]}[
        placement
    ]
    norms = {name: {"scale": jnp.asarray(scales[name])} for name in used}

    def before(y):
        return {"rms": rms, "layer": layer_norm}[norm](y) * scales["norm"]

    def after(y):
        return {"rms": rms, "layer": layer_norm}[norm](y) * scales["output_norm"]

    total = x + delta
    want = {
        "pre": lambda: total + 0.5 * (before(total) @ matrix),
        "post": lambda: before(total + 0.5 * (total @ matrix)),
        "output": lambda: total + 0.5 * after(total @ matrix),
        "sandwich": lambda: total + 0.5 * after(before(total) @ matrix),
    }[placement]()
    for first, second in ((x, delta), (total, None)):
        got, inner = enter(jnp.asarray(first), second, norms, c, CPU)
        got, rest = leave(got, inner @ matrix, norms, c, CPU)
        np.testing.assert_allclose(got if rest is None else got + rest, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("norm", "span"), [("layer", "each_head"), ("rms", "each_head"), ("rms", "all_heads")])
def test_norms_of_queries_and_keys_leave_values_alone(norm, span):
    c = config(norm=norm, qk_norm=True, qk_norm_span=span)
    qkv, q_scale, k_scale = normal(5, 2, 4, 3), normal(2, 2, 3), normal(2, 3)
    out = np.asarray(normalise_heads(jnp.asarray(qkv), jnp.asarray(q_scale), jnp.asarray(k_scale), c, 1))
    axis = (1, 2, 3) if span == "all_heads" else -1
    plain = {"layer": layer_norm, "rms": lambda x: rms(x, axis)}[norm]
    np.testing.assert_allclose(out[:, :, :2], plain(qkv[:, :, :2]) * q_scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[:, :, 2:3], plain(qkv[:, :, 2:3]) * k_scale[:, None], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[:, :, 3], qkv[:, :, 3])


@pytest.mark.parametrize(("placement", "streams"), [("pre", "x"), ("entry", "norm of x")])
def test_what_is_added_to_and_what_is_added_have_scales_of_their_own(placement, streams):
    c = config(norm_placement=placement, skip_scale=1.5, residual_scale=0.25)
    x, delta, out, scale = normal(4, 6), normal(4, 6) + 1, normal(4, 6) - 1, normal(6)
    total = x.astype(np.float64) + delta
    inner = rms(total) * scale
    norms = {"norm": {"scale": jnp.asarray(scale)}}
    stream, taken = enter(x, delta, norms, c, CPU)
    np.testing.assert_allclose(taken, inner, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stream, 1.5 * {"x": total, "norm of x": inner}[streams], rtol=1e-5, atol=1e-6)
    stream, added = leave(stream, jnp.asarray(out), norms, c, CPU)
    np.testing.assert_allclose(added, 0.25 * out, rtol=1e-5, atol=1e-6)


UNTIMED = Target("cpu", untimed=True)


@pytest.mark.parametrize(
    "fields",
    [{}, {"norm_offset": 1.0}, {"norm_placement": "sandwich"}, {"residual_scale": 0.5}, {"norm": "layer"}],
    ids=str,
)
def test_a_half_of_a_layer_is_the_same_where_its_norm_is_left_to_the_projection(fields):
    c = config(**fields)
    weights = {"gate_up": jnp.asarray(normal(6, 2, 10)), "down": jnp.asarray(normal(10, 6))}
    norms = {"norm": {"scale": jnp.asarray(normal(6))}}
    if c.norm_placement == "sandwich":
        norms["output_norm"] = {"scale": jnp.asarray(normal(7)[:6])}
    x, delta = jnp.asarray(normal(3, 6)), jnp.asarray(normal(6, 3).T)
    with choice.recorded() as made:
        got = Mlp.compute(x, delta, norms, weights, config=c, shards=1, target=UNTIMED)
    assert ("norm_gate_up" in {decision.op for decision in made}) == (c.norm == "rms")
    for ours, theirs in zip(got, Mlp.compute(x, delta, norms, weights, config=c, shards=1, target=CPU), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_norms_whose_result_is_wanted_stay_where_they_are():
    norms, weight = {"norm": {"scale": jnp.ones(128)}}, jnp.zeros((128, 128))
    rounded = dataclasses.replace(quantize(weight, "int8"), round_activations=True)
    assert folded(None, norms, config(), UNTIMED, weight) is not None
    assert folded(None, norms, config(), CPU, weight) is None, "not timed yet"
    assert folded(None, norms, config(), UNTIMED, None) is None, "adapters take it, too"
    assert folded(None, norms, config(), UNTIMED, rounded) is None
    for fields in ({"norm": "layer"}, {"norm_placement": "post"}, {"norm_placement": "entry"}, {"skip_scale": 2.0}):
        assert folded(None, norms, config(**fields), UNTIMED, weight) is None, fields
    with observed(lambda name, x: None):
        assert folded(None, norms, config(), UNTIMED, weight) is None
