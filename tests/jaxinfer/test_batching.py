"""Who shares the batch, how far the host runs ahead and what is preempted must not change any output."""

import pytest

from jaxinfer import SamplingParams, startup
from jaxinfer.engine import step
from pallas_kernels.target import Target
from tests.jaxinfer.prompts import alone, assert_same_listed, ids, poison, tokens

CASES = ["llama", "qwen2_windows"]
PROMPTS = [ids(length) for length in (1, 7, 8, 9, 33, 40, 3, 16)]
GREEDY = [
    SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in (24, 9, 40, 17, 30, 1, 22, 5)
]
SAMPLED = [
    SamplingParams(max_tokens=24, ignore_eos=True, seed=1),
    SamplingParams(max_tokens=20, ignore_eos=True, seed=1, temperature=3.0),
    SamplingParams(max_tokens=20, ignore_eos=True, seed=2, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=20, ignore_eos=True, seed=3, top_p=0.5),
    SamplingParams(max_tokens=20, ignore_eos=True, seed=4, temperature=2.0, min_p=0.1, top_k=50, top_p=0.9),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0),
    SamplingParams(max_tokens=20, ignore_eos=True, seed=2**32 - 1, temperature=5.0),
    SamplingParams(max_tokens=20, ignore_eos=True, seed=0, top_k=2, temperature=9.0),
]
MIXED = [*GREEDY[:4], *SAMPLED[4:]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_mixed_batch_equals_each_alone(case, params, models):
    llm = models(case)
    expected = tokens(alone(llm, PROMPTS, params))
    assert [len(choice) for (choice,) in expected] == [p.max_tokens for p in params]
    assert tokens(llm.generate(PROMPTS, params)) == expected
    assert tokens(llm.generate(PROMPTS[::-1], params[::-1])) == expected[::-1]


@pytest.mark.parametrize("case", CASES)
def test_one_step_in_flight_equals_two_and_three(case, models):
    expected = tokens(models(case).generate(PROMPTS, MIXED))
    for depth in (1, 3):
        assert tokens(models(case, steps_in_flight=depth).generate(PROMPTS, MIXED)) == expected


@pytest.mark.parametrize(("case", "num_pages"), [("llama", 9), ("qwen2_windows", 9)])
def test_preempted_and_resumed_equals_undisturbed(case, num_pages, models):
    params = [SamplingParams(**{**vars(p), "max_tokens": 30}) for p in MIXED]
    expected = models(case).generate(PROMPTS, params)
    assert not any(output.metrics.num_preemptions for output in expected)
    outputs = models(case, num_pages=num_pages).generate(PROMPTS, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == tokens(expected)


@pytest.mark.parametrize("logprobs", [3, -1])
def test_preemption_keeps_log_probabilities(logprobs, models):
    """None is lost, none comes twice, none changes."""
    params = [
        SamplingParams(max_tokens=30, seed=seed, ignore_eos=True, logprobs=logprobs, prompt_logprobs=prompt)
        for seed, prompt in enumerate([logprobs, None] * 4)
    ]
    expected = models("llama").generate(PROMPTS, params)
    outputs = models("llama", num_pages=9).generate(PROMPTS, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == tokens(expected)
    for output, undisturbed in zip(outputs, expected, strict=True):
        one, other = output.outputs[0].logprobs, undisturbed.outputs[0].logprobs
        scored, undisturbed_scored = output.prompt_logprobs, undisturbed.prompt_logprobs
        if logprobs == -1:
            assert one.shape == other.shape == (30, 251)
            assert abs(one - other).max() <= 1e-4
            assert scored is None or abs(scored - undisturbed_scored).max() <= 1e-4
            assert (scored is None) == (undisturbed_scored is None)
        else:
            assert len(one) == 30
            assert_same_listed(one, other)
            assert (scored is None) == (undisturbed_scored is None)
            if scored is not None:
                assert len(scored) == len(output.prompt_token_ids)
                assert_same_listed(scored[1:], undisturbed_scored[1:])


def test_a_window_runs_on_pages_it_has_left_behind(models):
    """7 pages of 8 tokens hold a window of 24 and a chunk; the sequence of 125 tokens would take 16."""
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    expected = tokens(models("mistral_window").generate(ids(5), params))
    llm = models("mistral_window", num_pages=7)
    assert tokens(llm.generate(ids(5), params)) == expected
    poison(llm)
    assert tokens(llm.generate(ids(5), params)) == expected


@pytest.mark.parametrize("case", CASES)
def test_nan_in_unused_pages_never_leaks(case, models):
    llm = models(case)
    params = [SamplingParams(**{**vars(p), "logprobs": 2, "prompt_logprobs": 2}) for p in MIXED]
    expected = llm.generate(PROMPTS, params)
    poison(llm)
    outputs = llm.generate(PROMPTS, params)
    assert tokens(outputs) == tokens(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert_same_listed(output.outputs[0].logprobs, other.outputs[0].logprobs, atol=0)
        assert_same_listed(output.prompt_logprobs[1:], other.prompt_logprobs[1:], atol=0)


def test_programs_without_branches_or_loops_give_the_same(models, monkeypatch):
    """What a GPU runs: greedy batches apart from the others, block tables of bucketed width read in one piece."""
    monkeypatch.setattr(startup, "data_dependent", lambda platform: False)
    monkeypatch.setattr(step, "target_of", lambda mesh: Target("gpu"))
    llm = models("qwen2_windows", memory_fraction=0.8)  # an LLM of its own
    params = [SamplingParams(**{**vars(p), "logprobs": 2, "prompt_logprobs": 2}) for p in MIXED]
    for wanted in (GREEDY, params):
        outputs, expected = llm.generate(PROMPTS, wanted), models("qwen2_windows").generate(PROMPTS, wanted)
        assert tokens(outputs) == tokens(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert_same_listed(output.outputs[0].logprobs, other.outputs[0].logprobs)
        assert_same_listed(output.prompt_logprobs[1:], other.prompt_logprobs[1:])
    assert {shape.sampling for shape in llm.engine._runner._executables} == {"greedy", "full"}
