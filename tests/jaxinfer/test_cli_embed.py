"""`jaxinfer embed`: vectors to stdout or a file, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import jaxinfer.compilation
import jaxinfer.llm
from jaxinfer.cli import main
from jaxinfer.outputs import EmbeddingOutput
from tests import tiny


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command asked of the LLM: the constructor's arguments, then those of `embed`."""
    made: list[Any] = []

    class LengthLLM:
        """Its vectors hold the length of the text, and a third."""

        def __init__(self, model: str, **settings: Any) -> None:
            made.append((model, settings))

        def embed(self, texts: list[str], **options: Any) -> list[EmbeddingOutput]:
            made.append((texts, options))
            return [EmbeddingOutput(text, [1], np.float32([len(text), 1 / 3])) for text in texts]

    monkeypatch.setattr(jaxinfer.llm, "LLM", LengthLLM)
    monkeypatch.setattr(jaxinfer.compilation, "enable_cache", lambda: None)
    return made


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["embed", "--model", "m", *args], input=stdin)


def test_prints_an_array_per_text(calls: list[Any]) -> None:
    done = run("--prompt", "hello", "--file", "-", "--pooling", "cls", "--truncate", stdin="one\nthree\n \n\n")
    assert done.exit_code == 0, done.output
    printed = [np.float32(json.loads(line)) for line in done.stdout.splitlines()]
    np.testing.assert_array_equal(printed, np.float32([[5, 1 / 3], [3, 1 / 3], [5, 1 / 3]]))
    (model, settings), (_, options) = calls
    assert (model, settings["task"], settings["warm_up"], settings["dtype"]) == ("m", "embed", False, "auto")
    assert options == {"pooling": "cls", "normalize": None, "truncate": True}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"one\n\nthree\n \nfive", "lines of the file are blank: 2, 4; a vector is made of every line"),
        (b"one\n\xff", "lines.txt is no UTF-8 text"),
    ],
)
def test_lines_that_would_go_unsaid(calls: list[Any], lines: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes(lines)
    done = run("--file", str(tmp_path / "lines.txt"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert not calls


def test_writes_a_file(calls: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "vectors.npy"
    done = run("--prompt", "hello", "--prompt", "you", "--no-normalize", "--output", str(file))
    assert done.stdout == f"{file}: 2 vectors of 2\n"
    assert calls[1][1]["normalize"] is False
    vectors = np.load(file)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.float32([[5, 1 / 3], [3, 1 / 3]]))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no text; give --prompt TEXT, or --file FILE"),
        (["--prompt", ""], "a text is empty; give it at least one character"),
        (["--prompt", "a", "--output", "a.txt"], "--output is a.txt; it is written as a .npy file"),
        (["--prompt", "a", "--output", "no/a.npy"], "--output is no/a.npy, whose folder does not exist"),
        (["--prompt", "a", "--pooling", "max"], "'max' is not one of 'cls', 'mean', 'last'"),
    ],
)
def test_refused_before_a_model_is_loaded(calls: list[Any], args: list[str], message: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not calls


def test_info_says_that_an_encoder_keeps_no_cache(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint("bert", tmp_path / "bert")
    text = CliRunner().invoke(main, ["info", str(folder)]).stdout
    assert "context         128 tokens, learned positions" in text
    assert "cache per token 0 B float32" in text
    assert text.splitlines()[-1] == "task            embeds text, and generates none: no cache is kept"
