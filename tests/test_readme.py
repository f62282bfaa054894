"""The code in README.md and docs/ runs, and the commands they show exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from convert.__main__ import main as convert_main
from jaxinfer.cli import main
from tests import markdown, tiny
from tests.convert import test_lora

PLACEHOLDER = 'model="path/to/model"'
"""How Python blocks name the model; a tiny random one takes its place, and compiles only what it is asked for."""
PROGRAMS = {"jaxinfer": main, "python -m convert": convert_main}
ADAPTER = '"path/to/adapter"'
"""A LoRA adapter of that model's."""
NOT_OURS = ("pip", "git", "cd", "python")
NUM_WORDS = 251


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose tokenizer knows a word per token, with a chat template."""
    folder = tiny.write_checkpoint("llama", tmp_path_factory.mktemp("readme") / "model")
    words = ["<unk>", "<s>", "</s>", "Hello", "Hi", "Once", "upon", "a", "time"]
    words += [f"word{number}" for number in range(len(words), NUM_WORDS)]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    raw = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    raw.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    raw.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return test_lora.adapter(model.parent / "lora", test_lora.pair(test_lora.Q, test_lora.A, test_lora.B))


@pytest.mark.usefixtures("no_new_families")
@pytest.mark.parametrize("path", [path for path in markdown.FILES if markdown.blocks(path, "python")], ids=str)
def test_python_blocks_run(
    path: Path,
    model: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    blocks = markdown.blocks(path, "python")
    for number, block in enumerate(blocks):
        source = block.replace(PLACEHOLDER, f"model={str(model)!r}, warm_up=False, progress=False")
        source = source.replace(ADAPTER, repr(str(adapter)))
        exec(compile(source, f"{path.name} block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    if any(PLACEHOLDER in block for block in blocks):
        assert re.search(r"word\d+", printed), "the blocks print what the model wrote"


def test_the_readme_has_python_to_run() -> None:
    assert len(markdown.blocks(markdown.ROOT / "README.md", "python")) >= 2


def commands(path: Path) -> list[list[str]]:
    """The commands of the file's bash and console blocks as words, without comments, variables and redirections."""
    prompts = [
        line[2:] for block in markdown.blocks(path, "console") for line in block.splitlines() if line[:2] == "$ "
    ]
    lines = [line for block in markdown.blocks(path, "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in [*prompts, *lines]:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words[: next((i for i, word in enumerate(words) if word in (">", "|", "<")), len(words))])
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (markdown.ROOT / "Makefile").read_text(), re.MULTILINE))


def check(words: list[str]) -> None:
    """Raises click.UsageError or AssertionError for a command line that the program would not take."""
    for name, command in PROGRAMS.items():
        prefix = name.split()
        if words[: len(prefix)] == prefix:
            parse(command, name, words[len(prefix) :])
            return
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= make_targets(), words
        return
    assert words[0] in NOT_OURS, f"unknown program in {words}"
    if words[0] == "python":
        assert (markdown.ROOT / words[1]).is_file(), words


def parse(command: click.Command, name: str, arguments: list[str]) -> None:
    """Parse as the command itself would, subcommands included, and run nothing."""
    while isinstance(command, click.Group):
        assert arguments, f"{name} needs a subcommand"
        if arguments[0] in ("--help", "--version"):
            return
        assert arguments[0] in command.commands, f"{name} has no command {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if "--help" not in arguments:
        command.make_context(name, arguments).close()


SHOWN = [(path, words) for path in markdown.FILES for words in commands(path)]


@pytest.mark.parametrize("words", [words for _, words in SHOWN], ids=" ".join)
def test_shown_commands_exist(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.txt", "text.txt"):  # that the commands read
        (tmp_path / name).write_text("Hello\n")
    check(words)


def test_every_command_of_the_program_is_shown() -> None:
    shown = {words[1] for _, words in SHOWN if words[0] == "jaxinfer" and len(words) > 1}
    shown |= set(re.findall(r"\$\(jaxinfer ([\w-]+)\)", (markdown.ROOT / "README.md").read_text()))
    assert set(main.commands) <= shown


@pytest.mark.parametrize(
    "line",
    [
        "jaxinfer generate --model m --promt x",
        "jaxinfer serve",
        "jaxinfer bench latency --batch-size many",
        "python -m convert only-one",
        "make everything",
        "python scripts/missing.py",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        check(line.split())
