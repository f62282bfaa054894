"""What the benchmarks compute from the engine's times, and the shapes they run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer import parameters, sizes
from jaxinfer.bench import measure_latency, measure_throughput, percentile, summarise
from jaxinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxinfer.presets import PRESETS
from jaxinfer.sampling_params import SamplingParams


def output(prompt: list[int], tokens: int, metrics: RequestMetrics) -> RequestOutput:
    completion = CompletionOutput(0, "", [5] * tokens, "length")
    return RequestOutput("0", None, prompt, [completion], True, metrics)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert parameters.count(PRESETS[name]) == count


def test_every_preset_is_counted_above() -> None:
    assert len(PRESETS) == 6


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([4.0], 99) == 4.0


def test_summary_of_two_requests() -> None:
    outputs = [
        output([1] * 10, 5, RequestMetrics(100.0, 101.0, 103.0)),  # 0.5 s a token after the first
        output([1] * 20, 11, RequestMetrics(100.0, 103.0, 104.0, 2)),  # 0.1 s
    ]
    result = summarise(outputs, total_time=4.0)
    assert dataclasses.asdict(result) == pytest.approx(
        {
            "num_prompts": 2,
            "input_tokens": 30,
            "output_tokens": 16,
            "total_time": 4.0,
            "requests_per_s": 0.5,
            "output_tokens_per_s": 4.0,
            "total_tokens_per_s": 11.5,
            "time_to_first_token_p50": 2.0,
            "time_to_first_token_p99": 2.98,
            "time_per_token_p50": 0.3,
            "time_per_token_p99": 0.496,
            "num_preemptions": 2,
        }
    )


class ScriptedLLM:
    """Gives each sequence of a batch its first token 1 s after the one before, then a token every 0.5 s."""

    def __init__(self, preset: str) -> None:
        self.config = PRESETS[preset]
        self.dtype = np.dtype("float32")
        self.weight_bytes = 4 * parameters.count(self.config)
        self.runs: list[tuple[list[dict[str, list[int]]], Any]] = []

    def generate(self, prompts: list[dict[str, list[int]]], params: Any) -> list[RequestOutput]:
        self.runs.append((prompts, params))
        each: list[SamplingParams] = params if isinstance(params, list) else [params] * len(prompts)
        outputs = []
        for row, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            assert one.max_tokens is not None
            first = 11.0 + row
            metrics = RequestMetrics(10.0, first, first + 0.5 * (one.max_tokens - 1))
            outputs.append(output(prompt["prompt_token_ids"], one.max_tokens, metrics))
        return outputs


def test_latency_of_a_batch() -> None:
    llm: Any = ScriptedLLM("smollm2-135m")
    result = measure_latency(llm, batch_size=3, input_len=7, output_len=5, repeats=2)
    assert result.time_to_first_token == 3.0, "the last of the batch"
    assert result.decode_step_ms == 500.0
    assert result.decode_tokens_per_s == 6.0
    assert result.weight_gb_per_step == pytest.approx(0.538060032), "tied: all weights are read"
    assert result.weight_gb_per_s == pytest.approx(1.076120064)
    assert result.total_time == 5.0
    assert len(llm.runs) == 3, "one run compiles, two are measured"
    prompts, params = llm.runs[0]
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [7, 7, 7]
    assert params.ignore_eos
    assert params.temperature == 0.0


def test_a_batch_that_the_cache_does_not_hold_is_no_batch() -> None:
    llm: Any = ScriptedLLM("smollm2-135m")
    with pytest.raises(ValueError, match="4 sequences of 12 tokens were not decoded together: the cache holds fewer"):
        measure_latency(llm, batch_size=4, input_len=7, output_len=5, repeats=1)


def test_an_embedding_that_is_not_the_head_is_not_read_whole() -> None:
    llm: Any = ScriptedLLM("llama-3-8b")
    result = measure_latency(llm, output_len=2, repeats=1)
    assert result.weight_gb_per_step == pytest.approx(4 * (8_030_261_248 - 128_256 * 4096) / 1e9)


def test_quantized_weights_are_read_as_they_are_stored() -> None:
    llm: Any = ScriptedLLM("llama-3-8b")
    llm.weight_bytes = 4 * 128_256 * 4096 + 1_000_000
    assert measure_latency(llm, output_len=2, repeats=1).weight_gb_per_step == pytest.approx(1e-3)


def test_throughput_prompts_vary_and_repeat_with_the_seed() -> None:
    llm: Any = ScriptedLLM("smollm2-135m")
    for seed in (1, 1, 2):
        measure_throughput(llm, num_prompts=50, input_len=20, output_len=10, seed=seed)
    assert llm.runs[0] == llm.runs[1] != llm.runs[2]
    prompts, params = llm.runs[0]
    inputs, outputs = [len(prompt["prompt_token_ids"]) for prompt in prompts], [one.max_tokens for one in params]
    assert (min(inputs), max(inputs)) == (10, 30)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert all(0 <= token < 49_152 for prompt in prompts for token in prompt["prompt_token_ids"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"output_len": 1}, "output_len is 1; it must be at least 2"),
        ({"repeats": 0}, "repeats is 0; it must be at least 1"),
    ],
)
def test_latency_refuses_what_it_cannot_measure(arguments: dict[str, int], message: str) -> None:
    llm: Any = SimpleNamespace()
    with pytest.raises(ValueError, match=message):
        measure_latency(llm, **arguments)


def test_what_fits_counts_replicated_kv_heads() -> None:
    config = PRESETS["llama-3-8b"]
    assert sizes.kv_bytes_per_token(config, "bfloat16") == 131_072
    one, eight, sixteen = (sizes.fit(config, 24, tensor, "bfloat16") for tensor in (1, 8, 16))
    assert one.weight_bytes == 16_060_522_496
    assert eight.weight_bytes == 2_007_565_312
    # 16 shards hold two copies of each kv head: a token takes twice the bytes, and k and v weights double
    assert sixteen.weight_bytes == (16_060_522_496 + 2 * 32 * 2 * 8 * 128 * 4096) // 16
    assert sixteen.cache_tokens == (int(24e9 * 0.9) - sixteen.weight_bytes) * 16 // 262_144
    assert sizes.fit(PRESETS["llama-3-8b"], 8, 1, "bfloat16").cache_tokens == 0
