"""Every family and rope kind computes what transformers computes, however the prompt is cut and cached."""

import numpy as np
import pytest

from convert.families import FAMILIES
from jaxinfer import LLM, SamplingParams
from tests import tiny, tiny_families
from tests.jaxinfer.conftest import TINY
from tests.jaxinfer.prompts import assert_listed, full_forward, ids

TOLERANCE = 1e-4
OTHER_SIZES = [
    {"page_size": 4, "max_num_batched_tokens": 7},
    {"page_size": 128, "max_num_batched_tokens": 128},
]
"""TINY cuts the 40 or 88 tokens of a golden prompt into chunks of two pages; these into odd ones, and not at all."""

SPLIT = [
    *(
        "arctic",
        "bloom",
        "cohere",
        "deepseek_v3",
        "falcon_new",
        "gemma2",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_oss",
        "gptj",
    ),
    *("llama4_text", "minimax"),
    *("mixtral", "olmo2", "opt_350m", "phi", "phi3", "qwen3_next"),
]
"""Each has something that is divided, or must not be, in its own way; scripts/model_table.py takes all."""


def assert_parity(llm, golden):
    """Log-probabilities after every prompt token, and the greedy continuation."""
    prompt = {"prompt_token_ids": golden["prompt_ids"].tolist()}
    scored = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1))[0]
    assert scored.prompt_logprobs.shape == golden["logprobs"].shape
    assert np.abs(scored.prompt_logprobs - golden["logprobs"]).max() <= TOLERANCE
    prompt = {"prompt_token_ids": golden["greedy_prompt_ids"].tolist()}
    tokens = len(golden["greedy_ids"])
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=20, prompt_logprobs=0)
    output = llm.generate(prompt, greedy)[0]
    assert output.outputs[0].token_ids == golden["greedy_ids"].tolist()
    return output


@pytest.mark.parametrize("case", tiny.ALL_CASES)
def test_goldens_belong_to_these_weights_and_tell_right_from_wrong(case, golden):
    expected = golden(case)
    assert expected["weights_sha256"] == tiny.sha256(tiny.weights(case))
    assert expected["logprobs"].std(axis=-1).min() >= 1.0
    assert len(expected["prompt_ids"]) > 2 * TINY["max_num_batched_tokens"]
    assert len(expected["greedy_ids"]) >= 16


@pytest.mark.parametrize("case", tiny.ALL_CASES)
def test_parity_with_transformers_and_cached_decode_equals_full_forward(case, models, golden):
    llm, expected = models(case), golden(case)
    output = assert_parity(llm, expected)
    rows = full_forward(llm, output)[len(output.prompt_token_ids) - 1 :]
    assert_listed(output.outputs[0].logprobs, rows, output.outputs[0].token_ids)


def test_every_family_has_a_golden():
    """Or is another's, under other names. Those of encoders are of hidden states: tests/jaxinfer/test_embed.py."""
    with_checkpoints = {config["model_type"] for config in tiny.EVERY_CASE.values()}
    assert with_checkpoints == set(FAMILIES) - set(tiny_families.SAME_AS)
    assert with_checkpoints >= set(tiny_families.SAME_AS.values())


@pytest.mark.parametrize("case", SPLIT)
def test_parity_on_two_devices(case, models, golden):
    """The prompt at once: heads, experts' and MLPs' halves, biases once, norms over all heads of both devices. Pages
    that end with Llama 4's chunks, which are taken apart then."""
    llm, expected = models(case, tensor_parallel_size=2, max_num_batched_tokens=40, page_size=4), golden(case)
    prompt = {"prompt_token_ids": expected["prompt_ids"].tolist()}
    scored = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1))[0]
    assert np.abs(scored.prompt_logprobs - expected["logprobs"]).max() <= TOLERANCE


@pytest.mark.parametrize("sizes", OTHER_SIZES, ids=str)
@pytest.mark.parametrize("case", ["qwen2_windows"])
def test_parity_whatever_the_page_and_chunk_size(case, sizes, models, golden):
    assert_parity(models(case, **sizes), golden(case))


@pytest.mark.parametrize("case", ["llama", "qwen2_windows"])
def test_prompts_around_the_page_and_chunk_size(case, models, golden):
    """The new token of a prompt's first L tokens has the distribution that the golden has after token L."""
    llm, expected = models(case), golden(case)
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 24, 25, 64, 65]
    prompts = [{"prompt_token_ids": expected["prompt_ids"][:length].tolist()} for length in lengths]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    for length, output in zip(lengths, outputs, strict=True):
        row = expected["logprobs"][length - 1]
        assert output.outputs[0].token_ids == [row.argmax()]
        assert_listed(output.outputs[0].logprobs, row[None], [row.argmax()])


@pytest.mark.parametrize("case", ["llama", "qwen2_windows"])
def test_all_log_probabilities_of_cached_decode_equal_the_full_forward(case, models):
    llm = models(case)
    output = llm.generate(ids(9), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=-1))[0]
    rows = full_forward(llm, output)[8:]
    assert output.outputs[0].logprobs.shape == rows.shape
    assert np.abs(output.outputs[0].logprobs - rows).max() <= TOLERANCE


@pytest.mark.parametrize("case", ["mistral_window", "qwen2_windows"])
def test_decode_far_past_the_window(case, models):
    llm = models(case)
    output = llm.generate(ids(5), SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True, logprobs=5))[0]
    rows = full_forward(llm, output)[4:]
    assert_listed(output.outputs[0].logprobs, rows, output.outputs[0].token_ids)


def test_sequences_longer_than_one_chunk_of_attention(tmp_path):
    """Portable attention reads 256 tokens of cache at a time: these sequences take three turns, windowed layers two."""
    tiny.write_config({**tiny.CASES["qwen2_windows"], "sliding_window": 300, "max_position_embeddings": 640}, tmp_path)
    tiny.write_safetensors(tiny.weights("qwen2_windows"), tmp_path)
    llm = LLM(str(tmp_path), **{**TINY, "max_model_len": 640, "page_size": 32, "max_num_batched_tokens": 64})
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=5)
    output = llm.generate(ids(560), params)[0]
    rows = full_forward(llm, output)
    assert_listed(output.outputs[0].logprobs, rows[559:], output.outputs[0].token_ids)
    short = llm.generate({"prompt_token_ids": ids(560)["prompt_token_ids"][:192]}, params)[0]
    assert_listed(short.outputs[0].logprobs[:1], rows[191:192], short.outputs[0].token_ids[:1])
