"""`jaxinfer generate`: prompts in, text out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import click

from jaxinfer.cli.common import Command, lines_of, memory_options, options
from jaxinfer.sampling_params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.outputs import RequestOutput

sampling_options = options(
    click.option("--max-tokens", type=int, default=256, help="Most tokens to generate."),
    click.option("--temperature", type=float, default=1.0, help="0: always the most likely token."),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens that reach this probability."),
    click.option("--top-k", type=int, default=0, help="Keep this many of the likeliest tokens; 0: all."),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the likeliest's."),
    click.option("--seed", type=int, help="The same seed gives the same text.  [default: random]"),
    click.option("--stop", multiple=True, metavar="STR", help="End before this string; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on past the model's end of text."),
    click.option(
        "--logprobs",
        type=click.IntRange(0, MAX_LOGPROBS),
        help="With --json: log-probabilities of this many alternatives per token.",
    ),
)


@click.command(cls=Command)
@click.option("--model", required=True, help="A folder, a GGUF file, a native checkpoint, or a Hugging Face id.")
@click.option("--prompt", "prompts", multiple=True, help="A prompt; may be repeated.")
@click.option("--prompt-file", type=click.File(encoding="utf-8-sig"), help="One prompt per line; - reads stdin.")
@click.option("--chat", is_flag=True, help="Put each prompt through the model's chat template, as the user's words.")
@click.option("--system", help="With --chat: the system message.")
@click.option(
    "--stream/--no-stream", default=None, help="Print text as it comes.  [default: one prompt, on a terminal]"
)
@click.option("--lora", type=click.Path(), help="A LoRA adapter, kept beside the weights, which may be quantized.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per prompt, one per line.")
@sampling_options
@memory_options
def generate(
    model: str,
    prompts: tuple[str, ...],
    prompt_file: IO[str] | None,
    chat: bool,
    system: str | None,
    stream: bool | None,
    lora: str | None,
    as_json: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    logprobs: int | None,
    **memory: Any,
) -> None:
    """Continue prompts, or answer them with --chat.

    \b
    Examples:
      jaxinfer generate --model ./Llama-3.1-8B-Instruct --chat --prompt "Why is the sky blue?"
      jaxinfer generate --model Qwen/Qwen3-0.6B --prompt "Once upon a time" --temperature 0.7 --seed 1
      jaxinfer generate --model ./model --prompt-file prompts.txt --json > answers.jsonl
    """
    every = [*prompts, *(line for line in lines_of(prompt_file) if line.strip())]
    if stream is None:
        stream = len(every) == 1 and sys.stdout.isatty() and not as_json
    _check(every, chat, system, stream, as_json, logprobs, lora)

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    from jaxinfer.compilation import enable_cache
    from jaxinfer.llm import LLM

    enable_cache()
    # A cache of no more sequences than prompts is small, and the same size in every run: its shape is part of what the
    # compilation cache looks up, and a size taken from the memory that is free now would never be found again.
    memory["max_num_seqs"] = min(memory["max_num_seqs"], len(every))
    adapter: dict[str, Any] = {}
    if lora is not None:
        memory["lora"], adapter["lora"] = {lora: lora}, lora
    llm = LLM(model, warm_up=False, progress=sys.stderr.isatty(), **memory)
    if stream:
        for text in _stream(llm, every[0], params, chat, system, **adapter):
            click.echo(text, nl=False)
        click.echo()
        return
    conversations = [_messages(p, system) for p in every]
    outputs = llm.chat(conversations, params, **adapter) if chat else llm.generate(every, params, **adapter)
    for prompt, output in zip(every, outputs, strict=True):
        if as_json:
            click.echo(json.dumps(to_record(prompt, output), ensure_ascii=False))
        elif len(every) == 1:
            click.echo(output.outputs[0].text)
        else:
            click.echo(f">>> {prompt}\n{output.outputs[0].text}\n")


def _check(
    prompts: list[str],
    chat: bool,
    system: str | None,
    stream: bool,
    as_json: bool,
    logprobs: int | None,
    lora: str | None,
) -> None:
    """Refuse, before anything is loaded, what the options cannot mean together."""
    if not prompts:
        raise click.UsageError("no prompt; give --prompt TEXT, or --prompt-file FILE with one prompt per line")
    if any(not prompt for prompt in prompts):
        raise click.UsageError("a prompt is empty; give it at least one character")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat: only a chat template has a place for it")
    if stream and as_json:
        raise click.UsageError("--json prints whole results; leave out --stream")
    if stream and len(prompts) > 1:
        raise click.UsageError(f"--stream takes one prompt, not {len(prompts)}; leave it out")
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json, which shows them")
    if lora == "":
        raise click.UsageError("--lora is empty; give an adapter's folder or Hugging Face id, or leave it out")


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": prompt}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _stream(
    llm: LLM, prompt: str, params: SamplingParams, chat: bool, system: str | None, **adapter: Any
) -> Iterator[str]:
    conversation = _messages(prompt, system)
    deltas = llm.stream_chat(conversation, params, **adapter) if chat else llm.stream(prompt, params, **adapter)
    return (delta.text for delta in deltas)


def to_record(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """One line of --json: plain values, times in seconds."""
    completion, metrics = output.outputs[0], output.metrics
    finished = metrics.finished_time
    record: dict[str, Any] = {
        "prompt": prompt,
        "text": completion.text,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "time_to_first_token": metrics.time_to_first_token,
        "total_time": None if finished is None else finished - metrics.arrival_time,
        "num_preemptions": metrics.num_preemptions,
    }
    if isinstance(completion.logprobs, list):
        record["logprobs"] = [
            {
                str(token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
                for token, entry in (position or {}).items()
            }
            for position in completion.logprobs
        ]
    return record
