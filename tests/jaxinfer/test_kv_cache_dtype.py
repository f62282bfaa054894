"""A cache in 8 bits: close to one in the model's dtype, and as independent of chunks, company and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from tests.jaxinfer.prompts import assert_listed, full_forward, ids, poison, tokens

DTYPES = [("int8", jnp.int8, 0.03), ("fp8", jnp.float8_e4m3fn, 0.2)]
"""Name, dtype, and how far log-probabilities may move on average: these weights are random, and scores large."""
FLIP = 0.05
"""A key between two stored values may fall either way, after rounding of another shape: that much is allowed there."""
CASE = "qwen2_windows"
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)


@pytest.mark.parametrize(("name", "dtype", "bound"), DTYPES)
@pytest.mark.parametrize("case", [CASE, "qwen3"])
def test_close_to_the_models_dtype_and_not_equal(case, name, dtype, bound, models, golden):
    reference = golden(case)
    llm = models(case, kv_cache_dtype=name)
    stored = {leaf.dtype.name for leaf in jax.tree.leaves(llm.engine._runner.state.cache)}
    assert stored == {jnp.dtype(dtype).name, "float32"}
    [output] = llm.generate([{"prompt_token_ids": reference["prompt_ids"].tolist()}], SCORED)
    off = np.abs(output.prompt_logprobs - reference["logprobs"])
    assert 1e-3 < off.mean() < bound, off.mean()


def test_chunks_company_and_preemption_change_nothing(models):
    """Keys and values are read as stored, by the chunk that writes them too."""
    prompts = [ids(length) for length in (3, 40, 70, 17)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    llm = models(CASE, kv_cache_dtype="int8")
    expected = tokens(llm.generate(prompts, params))
    assert [tokens(llm.generate(prompt, params))[0] for prompt in prompts] == expected
    whole = models(CASE, kv_cache_dtype="int8", page_size=128, max_num_batched_tokens=128)
    assert tokens(whole.generate(prompts, params)) == expected
    outputs = models(CASE, kv_cache_dtype="int8", num_pages=14).generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == expected


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_cached_decode_equals_the_full_forward_and_garbage_is_not_read(name, models):
    llm = models("llama", kv_cache_dtype=name)
    poison(llm)
    output = llm.generate(ids(9), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=5))[0]
    rows = full_forward(llm, output)[8:]
    assert_listed(output.outputs[0].logprobs, rows, output.outputs[0].token_ids, atol=FLIP)


def test_tensor_parallel(models, golden):
    prompt = {"prompt_token_ids": golden(CASE)["prompt_ids"].tolist()}
    one, two = (
        models(CASE, kv_cache_dtype="int8", tensor_parallel_size=size).generate(prompt, SCORED)[0] for size in (1, 2)
    )
    np.testing.assert_allclose(one.prompt_logprobs, two.prompt_logprobs, atol=FLIP)
