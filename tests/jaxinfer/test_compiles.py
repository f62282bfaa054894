"""After warm-up nothing compiles, whatever is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from tests.jaxinfer.conftest import TINY, assert_idle
from tests.jaxinfer.prompts import ids

SIZES = {"max_num_batched_tokens": 40, "max_num_seqs": 6, "num_pages": 20}


class CompileEvents:
    """Collects the names of JAX's events of tracing, lowering and compiling, cache hits included."""

    def __init__(self):
        self.names = []

    def __call__(self, event, duration, **_):
        if event.startswith("/jax/core/compile/"):
            self.names.append(event.removeprefix("/jax/core/compile/"))


@pytest.fixture
def events():
    listener = CompileEvents()
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield listener.names
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.fixture(scope="module")
def warm(models):
    return LLM(str(models.checkpoint("qwen2_windows")), **{**TINY, **SIZES, "warm_up": True})


def test_the_events_tell_a_trace_and_a_compile(events):
    def shift(x):
        return x + 42.5

    jax.jit(shift)(np.float32(1))
    assert {"jaxpr_trace_duration", "backend_compile_duration"} <= set(events)
    events.clear()
    jnp.zeros((3, 7, 11, 5))
    assert "backend_compile_duration" in events


def test_a_step_without_warm_up_is_seen(models, events):
    llm = LLM(str(models.checkpoint("llama")), **TINY)
    events.clear()
    llm.generate(ids(3), SamplingParams(max_tokens=1))
    assert {"jaxpr_trace_duration", "backend_compile_duration"} <= set(events)


def test_a_mixed_workload_compiles_and_traces_nothing(warm, events):
    prompts = [ids(length, seed) for seed in range(2) for length in (1, 2, 7, 16, 33, 40, 41, 64, 80, 100)]
    kinds = [
        {"temperature": 0.0},
        {"seed": 1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.0, "logprobs": 3},
        {"prompt_logprobs": 0},
        {"logprobs": -1, "prompt_logprobs": -1},
        {"n": 3, "logprobs": 20},
        {"min_tokens": 3, "stop_token_ids": [5, 6]},
        {"ignore_eos": True, "max_tokens": 40},
    ]
    params = [SamplingParams(**{"max_tokens": 12, **kinds[i % len(kinds)]}) for i in range(len(prompts))]
    outputs = warm.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for prompt, p in zip(prompts, params, strict=True):
        warm.generate(prompt, p)
    stream = warm.stream(ids(50), SamplingParams(max_tokens=30, n=2))
    next(stream)
    stream.close()
    for _ in warm.stream(ids(9), SamplingParams(max_tokens=5)):
        pass
    with pytest.raises(ValueError, match="empty prompt"):
        warm.generate({"prompt_token_ids": []})
    assert_idle(warm)
    assert events == []


def test_warm_up_compiles_what_can_run_and_no_more(warm):
    """Eight programs: ragged and scored batches of 16 and 40 tokens, decode batches of 1, 2, 4 and 6 sequences."""
    used, run = set(), warm.engine._runner.run

    def noted(batch):
        used.add(batch.shape)
        return run(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm.engine._runner, "run", noted)
        for count in (1, 2, 4, 6):
            greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
            warm.generate([ids(2, seed) for seed in range(count)], greedy)
        for logprobs in (None, -1):
            warm.generate([ids(40), ids(16)], SamplingParams(max_tokens=2, prompt_logprobs=logprobs))
            warm.generate(ids(16), SamplingParams(max_tokens=2, prompt_logprobs=logprobs))
    assert used == set(warm.engine._runner._executables) == set(warm.engine._builder.shapes())
    assert len(used) == 2 + 2 + 3
