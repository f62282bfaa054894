"""`jaxinfer bench`: how fast, as a table or as JSON. The measuring is in `jaxinfer.bench`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.common import Command, Decorator, memory_options, options

if TYPE_CHECKING:
    from jaxinfer.llm import LLM


def shape_options(input_len: int, output_len: int) -> Decorator:
    """The options of both benchmarks: which model, how long, and how to print."""
    return options(
        click.option("--model", help="A folder, a GGUF file, a native checkpoint, or a Hugging Face id."),
        click.option("--config", metavar="NAME", help="Instead of --model: a public model's shape, as llama-3-8b."),
        click.option("--random-weights", is_flag=True, help="With --config: fill the shape with random weights."),
        click.option("--input-len", type=int, default=input_len, help="Prompt tokens."),
        click.option("--output-len", type=int, default=output_len, help="New tokens."),
        click.option("--seed", type=int, default=0, help="Of the random prompts and weights."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    )


@click.group()
def bench() -> None:
    """Measure speed on prompts of random token ids.

    \b
    Examples:
      jaxinfer bench latency --model ./Llama-3.1-8B --batch-size 16
      jaxinfer bench throughput --config qwen3-8b --random-weights --num-prompts 500
    """


@bench.command(cls=Command)
@click.option("--batch-size", type=int, default=1, help="Sequences decoded together.")
@click.option("--repeats", type=int, default=3, help="Measured runs, of which the median counts.")
@shape_options(128, 128)
@memory_options
def latency(
    batch_size: int,
    repeats: int,
    model: str | None,
    config: str | None,
    random_weights: bool,
    input_len: int,
    output_len: int,
    seed: int,
    as_json: bool,
    **memory: Any,
) -> None:
    """One batch at a time: ms per decode step, tokens/s, time to first token, GB/s of weights.

    \b
    Examples:
      jaxinfer bench latency --model ./Llama-3.1-8B --batch-size 16 --json
      jaxinfer bench latency --config llama-3-8b --random-weights --dtype bfloat16 --tensor-parallel-size 2
    """
    source = _source(model, config, random_weights)
    memory["max_num_seqs"] = max(memory["max_num_seqs"], batch_size)
    memory["max_model_len"] = memory["max_model_len"] or input_len + output_len
    # The first run of the batch compiles just its own shapes.
    llm, startup = _load(source, seed, warm_up=False, memory=memory)

    from jaxinfer.bench import measure_latency

    result = measure_latency(
        llm, batch_size=batch_size, input_len=input_len, output_len=output_len, repeats=repeats, seed=seed
    )
    r = result
    rows = {
        "batch": f"{r.batch_size} sequences, {r.input_len} prompt and {r.output_len} new tokens each",
        "decode": f"{r.decode_tokens_per_s:.1f} tokens/s, {r.decode_step_ms:.2f} ms per step",
        "time to first token": f"{r.time_to_first_token * 1e3:.1f} ms",
        "weights": f"{r.weight_gb_per_step:.2f} GB per step, {r.weight_gb_per_s:.1f} GB/s",
        "total": f"{r.total_time:.2f} s, of one run; the programs were compiled before, in a run not measured",
    }
    _print(result, startup, rows, as_json)


@bench.command(cls=Command)
@click.option("--num-prompts", type=int, default=64, help="Requests, all submitted at once.")
@shape_options(128, 128)
@memory_options
def throughput(
    num_prompts: int,
    model: str | None,
    config: str | None,
    random_weights: bool,
    input_len: int,
    output_len: int,
    seed: int,
    as_json: bool,
    **memory: Any,
) -> None:
    """A crowd of requests: requests/s, tokens/s, and how long each waits.

    Lengths are random, uniform within half of --input-len and --output-len.

    \b
    Examples:
      jaxinfer bench throughput --model ./Llama-3.1-8B --num-prompts 1000 --max-num-seqs 256
      jaxinfer bench throughput --config smollm2-135m --random-weights --num-prompts 8 --json
    """
    source = _source(model, config, random_weights)
    longest = input_len + input_len // 2 + output_len + output_len // 2
    memory["max_model_len"] = memory["max_model_len"] or longest
    llm, startup = _load(source, seed, warm_up=True, memory=memory)

    from jaxinfer.bench import measure_throughput

    result = measure_throughput(llm, num_prompts=num_prompts, input_len=input_len, output_len=output_len, seed=seed)
    r = result
    rows = {
        "requests": f"{r.num_prompts} in {r.total_time:.2f} s, {r.requests_per_s:.2f} per second",
        "tokens": f"{r.input_tokens} prompt, {r.output_tokens} new",
        "output": f"{r.output_tokens_per_s:.1f} tokens/s",
        "prompt and output": f"{r.total_tokens_per_s:.1f} tokens/s",
        "time to first token": f"p50 {r.time_to_first_token_p50:.3f} s, p99 {r.time_to_first_token_p99:.3f} s",
        "time per token": f"p50 {r.time_per_token_p50 * 1e3:.2f} ms, p99 {r.time_per_token_p99 * 1e3:.2f} ms",
        "preemptions": f"{r.num_preemptions}",
    }
    _print(result, startup, rows, as_json)


def _source(model: str | None, config: str | None, random_weights: bool) -> str:
    """The model's path, or the preset's name; anything else is refused before jax is imported."""
    from jaxinfer.presets import PRESETS

    if model and not config and not random_weights:
        return model
    if config and not model:
        if config not in PRESETS:
            raise click.UsageError(f"no config is called {config!r}; there are {', '.join(PRESETS)}")
        if not random_weights:
            raise click.UsageError("--config gives only a shape; add --random-weights, or give --model")
        return config
    raise click.UsageError("give either --model PATH, or --config NAME --random-weights")


def _load(source: str, seed: int, warm_up: bool, memory: Mapping[str, Any]) -> tuple[LLM, float]:
    """The LLM, and the seconds it took to be ready."""
    from jaxinfer.compilation import enable_cache
    from jaxinfer.llm import LLM
    from jaxinfer.presets import PRESETS

    enable_cache()
    model = PRESETS.get(source, source)
    progress, start = sys.stderr.isatty(), time.monotonic()
    llm = LLM(model, seed=seed, skip_tokenizer_init=True, warm_up=warm_up, progress=progress, **memory)
    return llm, time.monotonic() - start


def _print(result: Any, startup: float, rows: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"startup_s": startup, **dataclasses.asdict(result)}))
        return
    for name, value in {"start-up": f"{startup:.1f} s", **rows}.items():
        click.echo(f"{name:<20} {value}")
