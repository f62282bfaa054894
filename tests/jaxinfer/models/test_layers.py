"""Projections, norm, MLP and the vocabulary's ends against numpy in float64."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models.layers import Embedding, Head, Mlp, linear, value
from meshes import build_mesh
from pallas_kernels.formats import FORMATS, dequantize, quantize
from pallas_kernels.target import CPU

CONFIG = ModelConfig("llama", 11, 6, 1, 2, 1, 4, 10, 16, RopeConfig(), mlp_bias=True)
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


MESH = build_mesh()
FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
}


def test_linear_contracts_the_leading_dimensions_of_a_weight():
    x, weight, bias = normal(5, 3, 2, 4), normal(3, 2, 4, 7), normal(7)
    want = np.einsum("tabc,abcd->td", x, weight)
    np.testing.assert_allclose(linear(x, weight, contract=3, target=CPU), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(linear(x, weight, bias, contract=3, target=CPU), want + bias, rtol=1e-5, atol=1e-5)
    x, weight, bias = normal(5, 4), normal(4, 3, 2), normal(3, 2)
    want = np.einsum("ti,iab->tab", x, weight) + bias
    np.testing.assert_allclose(linear(x, weight, bias, target=CPU), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_linear_takes_a_quantized_weight(format):
    x, weight, bias = normal(5, 2, 4, 8), normal(2, 4, 8, 3, 7), normal(3, 7)
    stored = quantize(weight, format, contract=3, group_size=32)
    want = np.einsum("ti,abi->tab", x.reshape(5, 64), dequantize(stored, jnp.float32)) + bias
    np.testing.assert_allclose(linear(x, stored, bias, contract=3, target=CPU), want, rtol=1e-5, atol=1e-5)


def mlp_weights():
    return {
        "gate_up": jnp.asarray(normal(6, 2, 10)),
        "down": jnp.asarray(normal(10, 6)),
        "gate_up_bias": jnp.asarray(normal(2, 10)),
        "down_bias": jnp.asarray(normal(6)),
    }


@pytest.mark.parametrize("activation", sorted(FORMULAS))
@pytest.mark.parametrize("bias", [False, True])
def test_the_gate_alone_is_activated(bias, activation):
    w, x, delta, scale = mlp_weights(), normal(3, 6), normal(3, 6), normal(6)
    total = x + delta
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + 0.5) * scale
    config = dataclasses.replace(CONFIG, mlp_bias=bias, activation=activation, norm_eps=0.5)
    gate, up = (normed @ w["gate_up"][:, i] + bias * w["gate_up_bias"][i] for i in range(2))
    want = (np.vectorize(FORMULAS[activation])(gate) * up) @ w["down"] + bias * w["down_bias"]
    weights = w if bias else {name: w[name] for name in ("gate_up", "down")}
    mlp, norms = Mlp(config, weights, MESH), {"norm": {"scale": jnp.asarray(scale)}}
    for first, second in ((x, delta), (total, None)):
        got, out = mlp(first, second, norms, CPU)
        np.testing.assert_array_equal(got, total)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_embedding_and_its_logits(rows):
    table, tokens = normal(11, 6), np.asarray([10, 0, 3, 3, 7])[:rows]
    embedding = Embedding({"weight": jnp.asarray(table)})
    np.testing.assert_array_equal(embedding(tokens), table[tokens])
    x = normal(rows, 6)
    np.testing.assert_allclose(embedding.logits(x), x @ table.T, rtol=1e-5, atol=1e-5)


def test_head_logits():
    x, table = normal(3, 6), normal(6, 11)
    np.testing.assert_allclose(
        Head(CONFIG, {"weight": jnp.asarray(table)}, MESH).logits(x, CPU), x @ table, rtol=1e-5, atol=1e-5
    )


def test_logits_of_low_precision_come_out_in_float32():
    """A sum of products that bfloat16 could not hold: 256 + 1."""
    x, table = jnp.asarray([[16.0, 1.0]], jnp.bfloat16), jnp.asarray([[16.0, 1.0], [1.0, 1.0]], jnp.bfloat16)
    head = Head(CONFIG, {"weight": table.T}, MESH)
    for logits in (Embedding({"weight": table}).logits(x), head.logits(x, CPU)):
        assert logits.dtype == jnp.float32
        np.testing.assert_array_equal(logits, [[257.0, 17.0]])


def test_logits_of_a_quantized_head_come_out_in_float32():
    x, table = jnp.asarray([[16.0, 1.0]], jnp.bfloat16), jnp.asarray([[127.0, 1.0], [1.0, 127.0]], jnp.bfloat16)
    stored = quantize(table, "int8")
    np.testing.assert_array_equal(Head(CONFIG, {"weight": stored}, MESH).logits(x, CPU), [[16 * 127 + 1, 16 + 127]])


def test_head_bias():
    config = dataclasses.replace(CONFIG, head_bias=True)
    x, table, bias = normal(3, 6), normal(6, 11), normal(11)
    head = Head(config, {"weight": jnp.asarray(table), "bias": jnp.asarray(bias)}, MESH)
    np.testing.assert_allclose(head.logits(x, CPU), x @ table + bias, rtol=1e-5, atol=1e-5)


def test_a_missing_parameter_has_no_value():
    assert value(None) is None
    np.testing.assert_array_equal(value(Embedding({"weight": jnp.ones(3)}).weight), np.ones(3))
