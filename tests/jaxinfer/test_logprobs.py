"""What `logprobs` and `prompt_logprobs` report: the model's raw log-softmax, whatever is sampled."""

import numpy as np
import pytest

from jaxinfer import SamplingParams
from tests.jaxinfer.prompts import VOCAB, assert_listed, full_forward, ids

HOT = {"temperature": 3.0, "top_k": 100, "ignore_eos": True}
"""Sampling under which the chosen token is often not a likely one."""


@pytest.fixture(scope="module")
def llm(models):
    return models("llama")


def prompt_of(golden, start, stop=None):
    return {"prompt_token_ids": golden("llama")["prompt_ids"][start:stop].tolist()}


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_new_tokens_list_the_chosen_and_the_most_likely(count, llm):
    [output] = llm.generate(ids(9), SamplingParams(max_tokens=12, seed=3, logprobs=count, **HOT))
    [choice] = output.outputs
    rows = full_forward(llm, output)[8:]
    assert_listed(choice.logprobs, rows, choice.token_ids)
    beyond = 0
    for entries, row, chosen in zip(choice.logprobs, rows, choice.token_ids, strict=True):
        top = set(np.argsort(-row)[:count].tolist())
        assert set(entries) == top | {chosen}
        beyond += chosen not in top
        assert all(type(token_id) is int and type(entries[token_id].logprob) is float for token_id in entries)
        assert all(entries[token_id].decoded_token is None for token_id in entries)
    assert beyond > 0
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_prompt_tokens_list_themselves_and_the_most_likely(count, llm, golden):
    prompt, rows = prompt_of(golden, 0, 40), golden("llama")["logprobs"][:39]
    [output] = llm.generate(prompt, SamplingParams(max_tokens=2, prompt_logprobs=count))
    own = prompt["prompt_token_ids"]
    assert output.prompt_logprobs[0] is None
    assert_listed(output.prompt_logprobs[1:], rows, own[1:])
    for entries, row, token_id in zip(output.prompt_logprobs[1:], rows, own[1:], strict=True):
        assert set(entries) == set(np.argsort(-row)[:count].tolist()) | {token_id}
        ranks = sorted(entry.rank for entry in entries.values())
        assert ranks[:count] == list(range(1, count + 1))
    assert output.outputs[0].logprobs is None


def test_a_prompt_of_one_token_has_nothing_to_list(llm, golden):
    [output] = llm.generate(prompt_of(golden, 0, 1), SamplingParams(max_tokens=2, prompt_logprobs=5))
    assert output.prompt_logprobs == [None]
    [output] = llm.generate(prompt_of(golden, 0, 1), SamplingParams(max_tokens=2, prompt_logprobs=-1))
    np.testing.assert_allclose(output.prompt_logprobs, golden("llama")["logprobs"][:1], atol=1e-4)


def test_the_whole_vocabulary_is_one_array(llm, golden):
    params = SamplingParams(max_tokens=5, seed=1, logprobs=-1, prompt_logprobs=-1, **HOT)
    [output] = llm.generate(prompt_of(golden, 0), params)
    for array, length in ((output.prompt_logprobs, 88), (output.outputs[0].logprobs, 5)):
        assert array.shape == (length, VOCAB)
        assert array.dtype == np.float32
        np.testing.assert_allclose(np.exp(array.astype(np.float64)).sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(output.prompt_logprobs, golden("llama")["logprobs"], atol=1e-4)
    np.testing.assert_array_equal(output.prompt_logprobs[-1], output.outputs[0].logprobs[0])


@pytest.mark.parametrize("logprobs", [None, 2, -1])
@pytest.mark.parametrize("prompt_logprobs", [None, 2, -1])
def test_the_two_are_independent(logprobs, prompt_logprobs, llm):
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    [output] = llm.generate(ids(20), params)
    kinds = {None: type(None), 2: list, -1: np.ndarray}
    assert type(output.outputs[0].logprobs) is kinds[logprobs]
    assert type(output.prompt_logprobs) is kinds[prompt_logprobs]
    [plain] = llm.generate(ids(20), SamplingParams(max_tokens=3, temperature=0.0))
    assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_several_prompts_at_once_each_get_their_own(llm, golden):
    """Prompts that share and split chunks, some scored, some not."""
    stops = [3, 40, 17, 1, 30, 8]
    wanted = [(None, -1), (5, 3), (-1, None), (2, 0), (None, None), (0, -1)]
    params = [
        SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=new, prompt_logprobs=old)
        for new, old in wanted
    ]
    outputs = llm.generate([prompt_of(golden, 0, stop) for stop in stops], params)
    for output, stop, (new, old) in zip(outputs, stops, wanted, strict=True):
        rows, [choice] = golden("llama")["logprobs"], output.outputs
        own = output.prompt_token_ids
        if old == -1:
            np.testing.assert_allclose(output.prompt_logprobs, rows[:stop], atol=1e-4)
        elif old is not None:
            assert_listed(output.prompt_logprobs[1:], rows[: stop - 1], own[1:])
        after = full_forward(llm, output)[stop - 1 :]
        if new == -1:
            np.testing.assert_allclose(choice.logprobs, after, atol=1e-4)
        elif new is not None:
            assert_listed(choice.logprobs, after, choice.token_ids)


def test_they_are_raw_whatever_the_temperature_filter_or_suppression(models, golden):
    """min_tokens keeps id 2, the end id, from being chosen, and from nothing else."""
    llm, [row] = models("llama"), golden("llama")["logprobs"][39:40]
    params = SamplingParams(max_tokens=1, min_tokens=1, temperature=0.3, top_k=1, stop_token_ids=[int(row.argmax())])
    params = SamplingParams(**{**vars(params), "logprobs": 20})
    [output] = llm.generate(prompt_of(golden, 0, 40), params)
    assert output.outputs[0].token_ids == [int(np.argsort(-row)[1])]
    assert_listed(output.outputs[0].logprobs, row[None], output.outputs[0].token_ids)
    assert int(row.argmax()) in output.outputs[0].logprobs[0]
    assert output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].rank == 2


def test_only_the_first_of_n_scores_the_prompt(llm):
    [output] = llm.generate(ids(12), SamplingParams(n=3, seed=5, max_tokens=4, logprobs=1, prompt_logprobs=1, **HOT))
    assert len(output.prompt_logprobs) == 12
    for choice in output.outputs:
        assert len(choice.logprobs) == 4
        assert all(chosen in entries for entries, chosen in zip(choice.logprobs, choice.token_ids, strict=True))
