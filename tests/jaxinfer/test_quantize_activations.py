"""`quantize_activations`: what the engine computes is a plain decoder's whose projections round what they take."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models import layers
from jaxinfer.parameters import flatten, is_quantized
from pallas_kernels.formats import quantize
from pallas_kernels.target import Target
from tests import tiny
from tests.jaxinfer.conftest import TINY
from tests.jaxinfer.interpreted_engine import FEW_CORES, interpreted
from tests.jaxinfer.plain_llama import decoder
from tests.jaxinfer.prompts import VOCAB

PROMPT = {"prompt_token_ids": np.random.default_rng(0).integers(0, 99, 40).tolist()}
"""All cases have these ids."""
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
CONFIG = {**tiny.CASES["llama"], "num_hidden_layers": 2, "rms_norm_eps": 1e-5}


def logprobs(llm):
    """[prompt, vocab], of a prompt of several chunks."""
    return llm.generate(PROMPT, SCORED)[0].prompt_logprobs.astype(np.float64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CASES, "llama", CONFIG)
        return tiny.write_checkpoint("llama", folder)


@pytest.mark.parametrize(("format", "size"), [("int8", 1), ("fp8", 1), ("int8", 2)])
def test_equals_a_plain_decoder_that_rounds(format, size, checkpoint):
    """Next to a step's middle the other neighbour may be taken: that is far less than rounding itself changes."""
    llm = LLM(str(checkpoint), quantization=format, quantize_activations=True, tensor_parallel_size=size, **TINY)
    got, tensors, token_ids = logprobs(llm), load_file(checkpoint / "model.safetensors"), PROMPT["prompt_token_ids"]
    want = decoder(CONFIG, tensors, token_ids, format, size)
    others = [decoder(CONFIG, tensors, token_ids, format, activations=False)]
    if size > 1:
        others.append(decoder(CONFIG, tensors, token_ids, format, 1))
    for other in others:
        assert np.abs(got - want).mean() < 0.05 * np.abs(got - other).mean()


@pytest.mark.parametrize("case", ["phi", "qwen2_moe"])
def test_other_norms_and_layers_of_experts(case, models, caplog):
    """LayerNorm, whose rows are rounded behind it; and experts, which are left, as the head is."""
    with caplog.at_level(logging.INFO, "jaxinfer"):
        llm = LLM(str(models.checkpoint(case)), quantization="int8", quantize_activations=True, **TINY)
    told = "activations that go into experts are not rounded; those of other projections are" in caplog.messages
    assert told == (case == "qwen2_moe")
    if case == "phi":
        change = np.abs(logprobs(llm) - logprobs(models(case, quantization="int8"))).mean()
        assert 1e-3 < change < 0.2
    quantized = {path: leaf for path, leaf in flatten(llm.engine._runner._weights) if is_quantized(leaf)}
    left = {path for path, leaf in quantized.items() if not leaf.round_activations}
    assert left == {path for path in quantized if "expert_" in path or path == "head.weight"}
    assert len(quantized) > len(left) > 0


def test_half_a_layer_on_kernels():
    """The norm writes 8 bits, gate and up read them, and what down takes is rounded, each by its kernel."""
    config = ModelConfig("llama", VOCAB, 1024, 1, 2, 1, 64, 256, 128, RopeConfig())
    keys = jax.random.split(jax.random.key(0), 5)
    x, delta = (jax.random.normal(key, (3, 1024), jnp.bfloat16) for key in keys[:2])
    shapes = {"gate_up": (1024, 2, 256), "down": (256, 1024)}
    weights = {
        name: dataclasses.replace(
            quantize(jax.random.normal(key, shape) * shape[0] ** -0.5, "int8"), round_activations=True
        )
        for key, (name, shape) in zip(keys[2:], shapes.items(), strict=False)
    }
    norms = {"norm": {"scale": 1 + 0.2 * jax.random.normal(keys[4], (1024,), jnp.bfloat16)}}
    with interpreted() as ran:
        got = layers._mlp(x, delta, norms, weights, config=config, shards=1, target=FEW_CORES)
        jax.block_until_ready(got)
    assert ran == {"quantize_rows", "quant_matmul"}
    want = layers._mlp(x, delta, norms, weights, config=config, shards=1, target=Target("gpu"))
    np.testing.assert_array_equal(got[0], want[0])
    difference = np.linalg.norm((got[1] - want[1]).astype(jnp.float32)) / np.linalg.norm(want[1].astype(jnp.float32))
    assert difference < 0.02  # XLA rounds the products with gate and up to bfloat16; then to int8 either way


@pytest.mark.parametrize(("quantization", "stored"), [(None, "not quantized"), ("int4", "in int4")])
def test_weights_that_are_not_in_8_bits_are_refused(quantization, stored, checkpoint):
    message = f"quantize_activations needs projections in int8 or fp8, and this model's are {stored}; pass quantization"
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint), quantization=quantization, quantize_activations=True, **TINY)
