"""Layers that keep a state per sequence: it belongs to its sequence alone, and starts with it."""

import numpy as np
import pytest

from jaxinfer import SamplingParams
from tests.jaxinfer.prompts import alone, ids, poison

CASES = ["qwen3_next", "minimax"]
VOCAB = 99


def prompts(*lengths):
    return [{"prompt_token_ids": [i % VOCAB for i in ids(length)["prompt_token_ids"]]} for length in lengths]


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=-1)


@pytest.fixture(params=CASES)
def llm(request, models):
    return models(request.param)


def test_two_in_a_batch_get_bit_for_bit_what_each_gets_alone(llm):
    """Wherever a prompt is cut for the other's sake, in slots that hold garbage, beside sequences of padding."""
    both, params = prompts(5, 23), [greedy(6), greedy(5)]
    expected = alone(llm, both, params)
    poison(llm)
    outputs = llm.generate(both, params)
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output.outputs[0].logprobs, other.outputs[0].logprobs)


def test_preempted_and_resumed_is_bit_for_bit_the_undisturbed(llm):
    """The sequence that comes back finds its state as it left it, or another's, and starts anew."""
    several, params = prompts(9, 12, 20), [greedy(20)] * 3
    expected = llm.generate(several, params)
    [pool] = llm.engine.scheduler.pools
    taken = pool.allocate(pool.num_free - 7)
    try:
        outputs = llm.generate(several, params)
    finally:
        for page in taken:
            pool.release(page)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, other in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(output.outputs[0].logprobs, other.outputs[0].logprobs)
