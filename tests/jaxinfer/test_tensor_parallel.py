"""Tensor parallelism on virtual devices: the same results, really sharded, two all-reduces a layer."""

import functools
import re

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.parameters import declare, flatten, for_tensor_parallel
from meshes import RULES, build_mesh
from tests.jaxinfer.conftest import TINY
from tests.jaxinfer.prompts import VOCAB, assert_same_listed, ids, tokens

CASES = [("llama_biases", 4), ("mistral_window", 2), ("qwen2", 2), ("qwen3", 8)]
"""2 kv heads each, so 4 and 8 devices replicate them; heads tied and not; biases after a reduction counted once."""
SIZES = [2, 4, 8]


def outputs_of(llm, golden):
    """A scored prompt of several chunks, and a sampled and a greedy continuation decoded one by one."""
    prompts = [
        {"prompt_token_ids": golden["prompt_ids"].tolist()},
        {"prompt_token_ids": golden["greedy_prompt_ids"].tolist()},
        ids(9),
    ]
    params = [
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1),
        SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True, prompt_logprobs=5, logprobs=5),
        SamplingParams(max_tokens=12, temperature=1.5, seed=3, ignore_eos=True, prompt_logprobs=0, logprobs=0),
    ]
    return [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(("case", "size"), CASES)
def test_equals_one_device_and_transformers(case, size, models, golden):
    expected, reference = golden(case), outputs_of(models(case), golden(case))
    outputs = outputs_of(models(case, tensor_parallel_size=size), expected)
    assert tokens(outputs) == tokens(reference)
    assert outputs[1].outputs[0].token_ids == expected["greedy_ids"].tolist()
    assert outputs[0].prompt_logprobs.shape == (88, VOCAB)
    assert np.abs(outputs[0].prompt_logprobs - expected["logprobs"]).max() <= 1e-4
    for output, other in zip(outputs[1:], reference[1:], strict=True):
        assert_same_listed(output.outputs[0].logprobs, other.outputs[0].logprobs)
        assert_same_listed(output.prompt_logprobs[1:], other.prompt_logprobs[1:])


def test_rows_that_pad_the_vocabulary_are_never_sampled_nor_counted(models):
    """251 ids on 8 devices take 256 rows; at this temperature every row would be drawn."""
    llm = models("mistral_window", tensor_parallel_size=8)
    assert llm.engine._config.vocab_rows > VOCAB
    params = SamplingParams(max_tokens=110, temperature=1e6, top_k=-1, n=6, seed=0, ignore_eos=True, logprobs=20)
    [output] = llm.generate(ids(9), params)
    drawn = {token_id for choice in output.outputs for token_id in choice.token_ids}
    listed = {token_id for choice in output.outputs for entries in choice.logprobs for token_id in entries}
    assert max(drawn) < VOCAB
    assert max(listed) < VOCAB
    assert len(drawn) > 0.9 * VOCAB
    [output] = llm.generate(ids(9), SamplingParams(max_tokens=3, temperature=0.0, logprobs=-1, prompt_logprobs=-1))
    for array in (output.outputs[0].logprobs, output.prompt_logprobs):
        assert array.shape[1] == VOCAB
        np.testing.assert_allclose(np.exp(array.astype(np.float64)).sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_weights_and_cache_are_sharded(size, models):
    llm = models("mistral_window", tensor_parallel_size=size)
    runner, config = llm.engine._runner, for_tensor_parallel(llm.config, size)
    parameters = dict(flatten(declare(config)))
    for path, leaf in flatten(runner._weights):
        shards = size if any(axis and RULES[axis] == "tensor" for axis in parameters[path].axes) else 1
        assert [shard.data.nbytes for shard in leaf.addressable_shards] == [leaf.nbytes // shards] * size, path
        assert shards == size or path.endswith("scale"), path
    for layer in runner.state.cache:
        for leaf in jax.tree.leaves(layer):
            assert {shard.data.shape[1] for shard in leaf.addressable_shards} == {max(2, size) // size}
            assert len({shard.device for shard in leaf.addressable_shards}) == size


@functools.cache
def decode_program(num_layers, size, tied=False, quantization=None):
    config = ModelConfig("llama", VOCAB, 64, num_layers, 8, 2, 16, 128, 256, RopeConfig(), tied_head=tied)
    llm = LLM(config, **TINY, tensor_parallel_size=size, quantization=quantization)
    runner = llm.engine._runner
    shape = next(shape for shape in llm.engine._builder.shapes() if shape.decode and shape.sequences == 4)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), runner.state)
    return runner.lower(shape, state).compile().as_text()


def count(kind, program):
    return len(re.findall(rf" {kind}(?:-start)?\(", program))


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_costs_two_all_reduces_and_nothing_else(tied):
    """Besides: one for the embedding, one all-gather for the logits."""
    one, three = (decode_program(num_layers, size=4, tied=tied) for num_layers in (1, 3))
    assert count("all-reduce", three) - count("all-reduce", one) == 2 * 2
    assert count("all-reduce", one) == 2 + 1
    for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert count(kind, three) == count(kind, one) == (kind == "all-gather"), kind


@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_are_gathered_and_not_the_head(tied):
    """Gathering the weights is one all-gather as well, of hidden_size rows or columns instead of the batch's."""
    gathered = [line for line in decode_program(1, size=4, tied=tied).splitlines() if " all-gather(" in line]
    [shape] = [re.search(r"= \w+\[([\d,]+)\]", line).group(1) for line in gathered]
    assert "64" not in shape.split(","), shape


def test_one_device_communicates_nothing():
    assert count("all-reduce", decode_program(1, size=1)) == 0


def test_a_mesh_of_ones_own(models):
    mesh = build_mesh(tensor=2, devices=jax.devices()[5:7])
    llm = models("qwen3", mesh=mesh)
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)
    assert tokens(llm.generate(ids(9), params)) == tokens(models("qwen3").generate(ids(9), params))
    leaves = jax.tree.leaves((llm.engine._runner._weights, llm.engine._runner.state))
    assert {device for leaf in leaves for device in leaf.devices()} == set(jax.devices()[5:7])


def test_a_mesh_with_other_axes_is_refused(models):
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"the mesh has axes \('tensor',\); it must have \('data', 'pipe', 'expert', "):
        models("llama", mesh=mesh)


def test_a_mesh_and_a_size_that_contradict_are_refused(models):
    with pytest.raises(ValueError, match="tensor_parallel_size 4 contradicts the mesh, whose tensor axis is 2"):
        models("llama", mesh=build_mesh(tensor=2), tensor_parallel_size=4)


def test_a_mesh_axis_that_is_not_used_yet_is_refused(models):
    with pytest.raises(ValueError, match="mesh axis 'data' has size 2; only 'tensor' may exceed 1"):
        models("llama", mesh=build_mesh(data=2))


@pytest.mark.parametrize(("case", "size"), [("llama", 3), ("llama", 5), ("llama_one_kv_head", 6)])
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(case, size, models):
    with pytest.raises(ValueError, match=rf"tensor_parallel_size {size} does not fit 8 query heads.*: 1, 2, 4, 8$"):
        models(case, tensor_parallel_size=size)


def test_too_few_devices_are_refused(models):
    with pytest.raises(ValueError, match=r"needs 16 devices, and there are 8 \(cpu\); lower the parallel sizes"):
        models("llama", tensor_parallel_size=16)
