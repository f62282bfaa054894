"""Measurements of an `LLM` on prompts of random token ids: the speed of one batch, and of a crowd."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxinfer.config import ModelConfig
from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.outputs import RequestMetrics, RequestOutput


@dataclass(frozen=True)
class Latency:
    """One batch of equal prompts, decoded together; each number is the median over the repeats."""

    batch_size: int
    input_len: int
    output_len: int
    time_to_first_token: float
    """Seconds from submission until the last sequence of the batch has its first token."""
    decode_step_ms: float
    """Milliseconds between two tokens of a sequence once the whole batch is prefilled."""
    decode_tokens_per_s: float
    """New tokens per second of the whole batch, in those steps."""
    weight_gb_per_step: float
    """Weights that a decode step reads, in 10**9 bytes, over all devices."""
    weight_gb_per_s: float
    """How fast they are read: below the memory's speed by what the step does besides."""
    total_time: float
    """Seconds from submission to the last token."""


@dataclass(frozen=True)
class Throughput:
    """A crowd of requests of random lengths, all submitted at once; times in seconds."""

    num_prompts: int
    input_tokens: int
    output_tokens: int
    total_time: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens per second."""
    time_to_first_token_p50: float
    """Waiting for a place in the batch included."""
    time_to_first_token_p99: float
    time_per_token_p50: float
    """A request's mean time between its tokens."""
    time_per_token_p99: float
    num_preemptions: int


def measure_latency(
    llm: LLM, *, batch_size: int = 1, input_len: int = 128, output_len: int = 128, repeats: int = 3, seed: int = 0
) -> Latency:
    """Decode `batch_size` random prompts together, once to compile and then `repeats` times to measure.

    Raises ValueError unless batch_size, input_len and repeats are at least 1 and output_len at least 2, and for a batch
    that the cache does not hold at once.
    """
    _at_least(1, batch_size=batch_size, input_len=input_len, repeats=repeats)
    _at_least(2, output_len=output_len)
    prompts = _random_prompts(llm.config, [input_len] * batch_size, seed)
    params = _forced_length(output_len)
    llm.generate(prompts, params)
    first, step, total = [], [], []
    for _ in range(repeats):
        metrics = [output.metrics for output in llm.generate(prompts, params)]
        start = min(m.arrival_time for m in metrics)
        # The sequence that began last: after its first token no step holds a prefill any more.
        last = max(metrics, key=lambda m: _first(m))
        if _first(last) > min(_finished(m) for m in metrics) or any(m.num_preemptions for m in metrics):
            raise ValueError(
                f"{batch_size} sequences of {input_len + output_len} tokens were not decoded together: the cache holds "
                "fewer; raise num_pages or memory_fraction, or lower batch_size"
            )
        first.append(_first(last) - start)
        step.append(_decode_time(last) / (output_len - 1))
        total.append(max(_finished(m) for m in metrics) - start)
    step_s, weights = statistics.median(step), _bytes_read(llm) / 1e9
    return Latency(
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        time_to_first_token=statistics.median(first),
        decode_step_ms=step_s * 1e3,
        decode_tokens_per_s=batch_size / step_s,
        weight_gb_per_step=weights,
        weight_gb_per_s=weights / step_s,
        total_time=statistics.median(total),
    )


def measure_throughput(
    llm: LLM, *, num_prompts: int = 64, input_len: int = 128, output_len: int = 128, seed: int = 0
) -> Throughput:
    """Serve `num_prompts` random prompts submitted at once; lengths are uniform within half of the given means.

    `llm` should be warmed up, or the measurement includes compilation. Raises ValueError for lengths below 2.
    """
    _at_least(1, num_prompts=num_prompts)
    _at_least(2, input_len=input_len, output_len=output_len)
    rng = random.Random(seed)
    lengths = [(_around(rng, input_len), _around(rng, output_len)) for _ in range(num_prompts)]
    prompts = _random_prompts(llm.config, [length for length, _ in lengths], seed)
    start = time.monotonic()
    outputs = llm.generate(prompts, [_forced_length(length) for _, length in lengths])
    return summarise(outputs, time.monotonic() - start)


def summarise(outputs: Sequence[RequestOutput], total_time: float) -> Throughput:
    """The Throughput of finished outputs that took `total_time` seconds together, each of 2 tokens or more."""
    metrics = [output.metrics for output in outputs]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    input_tokens, output_tokens = sum(len(output.prompt_token_ids) for output in outputs), sum(lengths)
    waits = [_first(m) - m.arrival_time for m in metrics]
    gaps = [_decode_time(m) / (length - 1) for m, length in zip(metrics, lengths, strict=True)]
    return Throughput(
        num_prompts=len(outputs),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_time=total_time,
        requests_per_s=len(outputs) / total_time,
        output_tokens_per_s=output_tokens / total_time,
        total_tokens_per_s=(input_tokens + output_tokens) / total_time,
        time_to_first_token_p50=percentile(waits, 50),
        time_to_first_token_p99=percentile(waits, 99),
        time_per_token_p50=percentile(gaps, 50),
        time_per_token_p99=percentile(gaps, 99),
        num_preemptions=sum(m.num_preemptions for m in metrics),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed, linear between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _random_prompts(config: ModelConfig, lengths: Sequence[int], seed: int) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(config.vocab_size) for _ in range(length)]} for length in lengths]


def _forced_length(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def _around(rng: random.Random, mean: int) -> int:
    return rng.randint(max(2, mean - mean // 2), mean + mean // 2)


def _bytes_read(llm: LLM) -> int:
    """Bytes of weights that a decode step reads: an embedding that is not also the head gives only a few rows."""
    if llm.config.tied_head:
        return llm.weight_bytes
    return llm.weight_bytes - llm.config.vocab_rows * llm.config.hidden_size * llm.dtype.itemsize


def _first(metrics: RequestMetrics) -> float:
    assert metrics.first_token_time is not None, "a finished request has a first token"
    return metrics.first_token_time


def _finished(metrics: RequestMetrics) -> float:
    assert metrics.finished_time is not None, "generate returns finished requests"
    return metrics.finished_time


def _decode_time(metrics: RequestMetrics) -> float:
    return _finished(metrics) - _first(metrics)


def _at_least(limit: int, **values: int) -> None:
    for name, value in values.items():
        if value < limit:
            raise ValueError(f"{name} is {value}; it must be at least {limit}")
