"""One layer at a time: the whole model's numbers, and a look at what every projection takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
from jaxinfer.layerwise import LayerByLayer
from jaxinfer.parameters import declare, flatten
from tests import tiny

CASES = ["llama", "opt_350m", "gptj", "qwen3_next", "deepseek_v3"]
"""Projected embeddings and learned positions, parallel halves, a state in place of keys and values and experts beside
a shared one, attention over latents."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`checkpoint(case)`"""
    folder = tmp_path_factory.mktemp("layerwise")
    return lambda case: convert.open_checkpoint(tiny.write_checkpoint(case, folder / case))


@pytest.mark.parametrize("case", CASES)
def test_parity_with_transformers(case, checkpoint, golden):
    want = golden(case)
    ids = want["prompt_ids"]
    model = LayerByLayer(checkpoint(case), len(ids), np.float32)
    hidden = model.embedded(ids)
    for layer in range(model.config.num_layers):
        hidden = model.run(layer, model.layer_weights(layer), hidden)
    got = jax.nn.log_softmax(model.logits(hidden))
    np.testing.assert_allclose(got, want["logprobs"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_every_projection_of_a_layer_is_seen(case, checkpoint):
    seen = {}
    model = LayerByLayer(checkpoint(case), 16, np.float32, seen.__setitem__)
    hidden = model.embedded(range(16))
    for layer in range(model.config.num_layers):
        seen.clear()
        hidden = model.run(layer, model.layer_weights(layer), hidden).block_until_ready()
        jax.effects_barrier()
        projections = {
            path.removeprefix(f"layers.{layer}."): parameter.inputs
            for path, parameter in flatten(declare(model.config))
            if path.startswith(f"layers.{layer}.") and parameter.contract and not parameter.batch
        }
        choices = seen.pop("mlp.experts", None)
        rows = seen.pop("mlp.expert_gate_up", None)
        if model.config.routes(layer):
            assert (rows.shape, choices.shape) == (hidden.shape, (16, model.config.experts_per_token))
        assert {name: x.size // 16 for name, x in seen.items()} == projections
        assert projections


def test_what_is_seen_is_what_the_projections_take(checkpoint):
    seen = {}
    model = LayerByLayer(checkpoint("llama"), 16, np.float32, seen.__setitem__)
    hidden, weights = model.embedded(range(16)), model.layer_weights(1)
    out = model.run(1, weights, hidden).block_until_ready()
    jax.effects_barrier()
    x = {name: np.asarray(value, np.float64) for name, value in seen.items()}
    w = {path.removeprefix("layers.1."): np.asarray(value, np.float64) for path, value in weights.items()}
    normed = hidden / np.sqrt(np.mean(np.square(hidden), -1, keepdims=True) + 1e-5) * w["attention_norm.scale"]
    np.testing.assert_allclose(x["attention.qkv"], normed, rtol=1e-4, atol=1e-5)
    middle = hidden + np.einsum("tkqd,kqde->te", x["attention.out"], w["attention.out"])
    normed = middle / np.sqrt(np.mean(np.square(middle), -1, keepdims=True) + 1e-5) * w["mlp_norm.scale"]
    np.testing.assert_allclose(x["mlp.gate_up"], normed, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(middle + x["mlp.down"] @ w["mlp.down"], out, rtol=1e-4, atol=1e-5)


def test_nobody_looks_unless_asked(checkpoint):
    model = LayerByLayer(checkpoint("llama"), 16, np.float32)
    arguments = 0, model.layer_weights(0), model.embedded(range(16))
    program = jax.make_jaxpr(lambda hidden: model.run(*arguments[:2], hidden))(jnp.asarray(arguments[2]))
    assert "callback" not in str(program)
