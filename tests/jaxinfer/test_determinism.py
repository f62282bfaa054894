"""Randomness comes from seeds alone."""

import pytest

from jaxinfer import LLM, SamplingParams
from tests.jaxinfer.conftest import TINY
from tests.jaxinfer.prompts import alone, ids, tokens


def sampled(**settings):
    return SamplingParams(**{"max_tokens": 16, "ignore_eos": True, "temperature": 2.0, **settings})


@pytest.fixture(scope="module")
def llm(models):
    return models("llama")


def test_a_seed_gives_the_same_alone_again_and_in_a_crowd(llm):
    params = [sampled(seed=7), sampled(seed=8), sampled(seed=9, top_p=0.7), sampled(temperature=0.0)]
    prompts = [ids(9), ids(20), ids(1), ids(12)]
    expected = tokens(alone(llm, prompts, params))
    assert tokens(alone(llm, prompts, params)) == expected
    assert tokens(llm.generate(prompts, params)) == expected


def test_different_seeds_differ(llm):
    outputs = llm.generate([ids(9)] * 6, [sampled(seed=seed) for seed in range(6)])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 6


def test_every_position_draws_anew(llm):
    """At this temperature all ids are equally likely: the same draw each time would repeat one."""
    [output] = llm.generate(ids(9), sampled(seed=1, temperature=1e6, max_tokens=100))
    assert len(set(output.outputs[0].token_ids)) > 60


def test_greedy_ignores_the_seed(llm):
    outputs = llm.generate([ids(9)] * 4, [sampled(temperature=0.0, seed=seed) for seed in range(4)])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_n_outputs_are_numbered_independent_and_the_first_is_that_of_n_1(llm):
    [output] = llm.generate(ids(9), sampled(seed=7, n=6))
    assert [choice.index for choice in output.outputs] == list(range(6))
    assert all(len(choice.token_ids) == 16 and choice.finish_reason == "length" for choice in output.outputs)
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 6
    [single] = llm.generate(ids(9), sampled(seed=7))
    assert single.outputs[0].token_ids == output.outputs[0].token_ids


def test_requests_without_a_seed_follow_the_seed_of_the_llm(models):
    def draws(seed):
        llm = LLM(str(models.checkpoint("llama")), **TINY, seed=seed)
        return tokens([*llm.generate([ids(9)] * 2, sampled()), *llm.generate(ids(9), sampled())])

    first = draws(0)
    assert len({tuple(choice) for [choice] in first}) == 3
    assert draws(0) == first
    assert draws(1) != first


def test_a_draw_follows_the_distribution(llm):
    """400 first tokens at temperature 2, filtered to 4 ids, against the softmax of the reported log-probabilities."""
    prompt = ids(20)  # whose 4 likeliest ids are far from equal
    [scored] = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=4))
    listed = sorted(scored.outputs[0].logprobs[0].items(), key=lambda item: item[1].rank)[:4]
    weights = [2.718281828 ** (entry.logprob / 2.0) for _, entry in listed]
    params = [SamplingParams(max_tokens=1, temperature=2.0, top_k=4, n=100, seed=seed) for seed in range(4)]
    drawn = [choice.token_ids[0] for output in llm.generate([prompt] * 4, params) for choice in output.outputs]
    assert set(drawn) <= {token_id for token_id, _ in listed}
    for (token_id, _), weight in zip(listed, weights, strict=True):
        share = weight / sum(weights)
        deviation = (share * (1 - share) / len(drawn)) ** 0.5
        assert abs(drawn.count(token_id) / len(drawn) - share) < 4 * deviation
