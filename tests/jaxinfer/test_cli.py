"""The command line: what goes to which stream, which status it exits with, and the numbers it prints."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import jaxinfer
import jaxinfer.compilation
import jaxinfer.llm
from jaxinfer.cli import main
from jaxinfer.cli.env import devices
from jaxinfer.cli.interrupt import interruptible
from jaxinfer.config import Quantization
from jaxinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TextDelta
from jaxinfer.presets import PRESETS
from jaxinfer.sampling_params import SamplingParams


@dataclass
class EchoLLM:
    """Stands in for `LLM`: answers with the prompt in capitals, and remembers what it was asked."""

    model: Any
    kwargs: dict[str, Any]
    calls: list[tuple[str, Any, SamplingParams]] = field(default_factory=list)

    def output(self, prompt: str) -> RequestOutput:
        completion = CompletionOutput(0, prompt.upper(), [7, 8], "stop", "!", [{7: Logprob(-0.5, 1, "A")}, None])
        return RequestOutput("0", prompt, [1, 2], [completion], True, RequestMetrics(10.0, 10.25, 11.0))

    def generate(self, prompts: list[str], params: SamplingParams, lora: str | None = None) -> list[RequestOutput]:
        self.calls.append(("generate" if lora is None else f"generate with {lora}", prompts, params))
        return [self.output(prompt) for prompt in prompts]

    def chat(self, conversations: list[list[dict[str, str]]], params: SamplingParams) -> list[RequestOutput]:
        self.calls.append(("chat", conversations, params))
        return [self.output(messages[-1]["content"]) for messages in conversations]

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[TextDelta]:
        self.calls.append(("stream", prompt, params))
        yield from (TextDelta(0, character.upper(), [7]) for character in prompt)

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[TextDelta]:
        self.calls.append(("stream_chat", messages, params))
        return self.stream(messages[-1]["content"], params)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[EchoLLM]:
    """Every LLM that the command makes."""
    made: list[EchoLLM] = []

    def make(model: Any, **kwargs: Any) -> EchoLLM:
        made.append(EchoLLM(model, kwargs))
        return made[-1]

    monkeypatch.setattr(jaxinfer.llm, "LLM", make)
    monkeypatch.setattr(jaxinfer.compilation, "enable_cache", lambda: None)
    return made


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(args), input=stdin)


def test_generate_prints_only_the_text(made: list[EchoLLM]) -> None:
    done = run("generate", "--model", "m", "--prompt", "hello")
    assert (done.exit_code, done.stdout) == (0, "HELLO\n")
    assert made[0].model == "m"
    assert made[0].kwargs["warm_up"] is False


def test_options_reach_the_engine(made: list[EchoLLM]) -> None:
    args = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 4 --stop a --stop b --ignore-eos"
    engine = (
        "--dtype bfloat16 --quantization fp8 --quantize-activations --tensor-parallel-size 2 --max-model-len 99 "
        "--max-num-seqs 3 --max-num-batched-tokens 77 --page-size 16 --num-pages 10 --kv-cache-dtype int8 "
        "--memory-fraction 0.5"
    )
    done = run("generate", "--model", "m", "--prompt", "x", *args.split(), *engine.split())
    assert done.exit_code == 0, done.output
    assert made[0].calls[0][2] == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=4, stop=("a", "b"), ignore_eos=True
    )
    assert made[0].kwargs == {
        "warm_up": False,
        "progress": False,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "quantize_activations": True,
        "tensor_parallel_size": 2,
        "max_model_len": 99,
        "max_num_seqs": 1,  # no more than there are prompts
        "max_num_batched_tokens": 77,
        "page_size": 16,
        "num_pages": 10,
        "kv_cache_dtype": "int8",
        "memory_fraction": 0.5,
    }


def test_an_adapter_goes_to_the_model_and_to_the_prompts(made: list[EchoLLM]) -> None:
    done = run("generate", "--model", "m", "--prompt", "x", "--lora", "./adapter")
    assert done.exit_code == 0, done.output
    assert made[0].kwargs["lora"] == {"./adapter": "./adapter"}
    assert made[0].calls[0][0] == "generate with ./adapter"


def test_many_prompts_are_told_apart(made: list[EchoLLM]) -> None:
    done = run("generate", "--model", "m", "--prompt", "one", "--prompt-file", "-", stdin="two\n\nthree\n")
    assert done.stdout == ">>> one\nONE\n\n>>> two\nTWO\n\n>>> three\nTHREE\n\n"
    assert len(made[0].calls) == 1, "all prompts go to the engine together"
    assert made[0].kwargs["max_num_seqs"] == 3


def test_json_is_one_object_per_prompt(made: list[EchoLLM]) -> None:
    done = run("generate", "--model", "m", "--prompt", "é", "--prompt", "b", "--json", "--logprobs", "1")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["text"] for record in records] == ["É", "B"]
    assert records[0] == {
        "prompt": "é",
        "text": "É",
        "prompt_token_ids": [1, 2],
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "stop_reason": "!",
        "time_to_first_token": 0.25,
        "total_time": 1.0,
        "num_preemptions": 0,
        "logprobs": [{"7": {"logprob": -0.5, "rank": 1, "decoded_token": "A"}}, {}],
    }


def test_chat_puts_the_system_message_first(made: list[EchoLLM]) -> None:
    done = run("generate", "--model", "m", "--prompt", "hi", "--chat", "--system", "Be brief.")
    assert done.stdout == "HI\n"
    kind, conversations, _ = made[0].calls[0]
    assert kind == "chat"
    assert conversations == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]]


def test_stream(made: list[EchoLLM]) -> None:
    assert run("generate", "--model", "m", "--prompt", "hi", "--stream").stdout == "HI\n"
    assert run("generate", "--model", "m", "--prompt", "yo", "--stream", "--chat").stdout == "YO\n"
    assert [llm.calls[0][0] for llm in made] == ["stream", "stream_chat"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "no prompt; give --prompt TEXT, or --prompt-file FILE"),
        ("--prompt a --prompt b --stream", "--stream takes one prompt, not 2"),
        ("--prompt a --stream --json", "--json prints whole results"),
        ("--prompt a --system b", "--system needs --chat"),
        ("--prompt a --lora=", "--lora is empty"),
        ("--prompt a --logprobs 3", "--logprobs needs --json"),
        ("--prompt a --logprobs 21 --json", "21 is not in the range 0<=x<=20"),
        ("--prompt a --dtype int7", "'int7' is not one of 'auto', 'float32', 'bfloat16', 'float16'"),
    ],
)
def test_options_that_contradict_are_refused(made: list[EchoLLM], args: str, message: str) -> None:
    done = run("generate", "--model", "m", *args.split())
    assert done.exit_code == 2
    assert message in done.stderr
    assert not made, "refused before a model is loaded"


def test_a_user_error_is_one_line(made: list[EchoLLM]) -> None:
    done = run("generate", "--model", "m", "--prompt", "x", "--top-p", "1.5")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "Error: top_p is 1.5; it must be above 0 and at most 1\n"


def test_debug_shows_the_traceback(made: list[EchoLLM]) -> None:
    done = run("generate", "--model", "m", "--prompt", "x", "--top-p", "1.5", "--debug")
    assert isinstance(done.exception, ValueError)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch, made: list[EchoLLM]) -> None:
    monkeypatch.setattr(EchoLLM, "generate", lambda *_: {}["missing"])
    assert isinstance(run("generate", "--model", "m", "--prompt", "x").exception, KeyError)


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, made: list[EchoLLM]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EchoLLM, "generate", interrupt)
    done = run("generate", "--model", "m", "--prompt", "x")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Interrupted\n")


def test_ctrl_c_in_a_collector_callback_is_not_lost() -> None:
    def press(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    def collect() -> None:
        gc.callbacks.append(press)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(press)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt), interruptible():
        collect()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_version() -> None:
    assert run("--version").stdout == f"jaxinfer, version {jaxinfer.__version__}\n"


def commands(group: click.Group = main, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*prefix, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_every_command_shows_an_example_of_itself(command: tuple[str, ...]) -> None:
    help_text = run(*command, "--help").stdout
    assert f"jaxinfer {' '.join(command)}" in help_text.split("Example", 1)[1]
    assert "TODO" not in help_text


def test_every_option_has_help() -> None:
    for path in commands():
        command: click.Command = main
        for name in path:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        assert all(option.help for option in command.params if isinstance(option, click.Option)), path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "give either --model PATH, or --config NAME --random-weights"),
        ("--model m --config llama-3-8b", "give either --model PATH, or --config NAME --random-weights"),
        ("--model m --random-weights", "give either --model PATH, or --config NAME --random-weights"),
        ("--config llama-3-8b", "--config gives only a shape; add --random-weights"),
        ("--config llama-9 --random-weights", "no config is called 'llama-9'; there are llama-3-8b, llama-3.2-1b"),
    ],
)
@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench_refuses_what_names_no_model(made: list[EchoLLM], kind: str, args: str, message: str) -> None:
    done = run("bench", kind, *args.split())
    assert done.exit_code == 2
    assert message in done.stderr
    assert not made


def test_env_tells_versions_devices_and_settings_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("JAX_API_TOKEN", "hunter2")
    monkeypatch.setenv("HOME_PAGE", "elsewhere")
    report = json.loads(run("env", "--json").stdout)
    assert report["packages"]["jaxinfer"] == jaxinfer.__version__
    assert report["packages"]["jax"].startswith("0.11.")
    assert report["variables"]["NCCL_DEBUG"] == "INFO"
    assert not {"JAX_API_TOKEN", "HOME_PAGE"} & set(report["variables"])
    assert report["devices"][0].startswith("cpu: ")
    text = run("env").stdout
    assert "hunter2" not in text
    assert "device 0           cpu: " in text


def test_env_survives_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")

    monkeypatch.setattr("jax.devices", broken)
    assert "JAX found none: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in run("env").stdout


def test_info_describes_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = types.SimpleNamespace(
        config=PRESETS["llama-3-8b"], format="safetensors", dtype="bfloat16", quantization=None
    )
    monkeypatch.setattr("convert.resolve", lambda path: path)
    monkeypatch.setattr("convert.open_checkpoint", lambda path: checkpoint)
    text = run("info", "model").stdout
    assert "architecture    llama, stored as safetensors in bfloat16" in text
    assert "parameters      8,030,261,248" in text
    assert "weights         32.12 GB float32, 16.06 GB bfloat16, 16.06 GB float16" in text
    assert "cache per token 262.1 kB float32, 131.1 kB bfloat16, 131.1 kB float16" in text
    assert "tensor parallel 1, 2, 4, 8, 16, 32 devices fit" in text
    # (0.9 · 24e9 − 2 · 8_030_261_248) / 131_072 tokens on one device of 24 GB
    assert text.splitlines()[-4].split() == ["1", "42,262", "426,784", "845,638"]
    report = json.loads(run("info", "model", "--json").stdout)
    assert report["config"] == json.loads(json.dumps(PRESETS["llama-3-8b"].to_dict()))
    assert {fit["tensor_parallel_size"] for fit in report["fits"]} == {1, 2, 4, 8}
    checkpoint.format, checkpoint.quantization = "native", Quantization("int4", 64)
    assert "stored as native in bfloat16, projections in int4, groups of 64" in run("info", "model").stdout
    report = json.loads(run("info", "model", "--json").stdout)
    assert report["quantization"] == dataclasses.asdict(Quantization("int4", 64))


def test_devices_are_asked_without_taking_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    devices()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
