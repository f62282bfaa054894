"""scripts/check_families.py: right is right, and what is wrong or fails is said and does not stop the others."""

import numpy as np
import pytest

from scripts import check_families
from tests import tiny


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*names, **changes)`: the exit status and the lines; changes of what the golden says, by its array."""

    def run(*names, **changes):
        load = np.load
        monkeypatch.setattr(tiny, "EVERY_CASE", {name: tiny.EVERY_CASE[name] for name in names})
        if changes:
            monkeypatch.setattr(check_families.np, "load", lambda path: Changed(load(path), changes))
        with pytest.raises(SystemExit) as stop:
            check_families.main(["--processes", "1"])
        return stop.value.code, capsys.readouterr().out.splitlines()

    return run


class Changed:
    def __init__(self, arrays, changes):
        self.arrays = {name: changes.get(name, lambda array: array)(arrays[name]) for name in arrays.files}

    def __enter__(self):
        return self.arrays

    def __exit__(self, *_):
        return None


def first_is_off(array):
    array[0] += 1
    return array


def test_a_decoder_and_an_encoder(run):
    status, lines = run("llama", "bert")
    assert status == 0
    assert [line.split()[0] for line in lines] == ["llama", "bert"]
    assert all(line.endswith("ok") for line in lines)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [("llama", "logprobs", "WRONG"), ("llama", "greedy_ids", "WRONG: other tokens"), ("bert", "mean", "WRONG")],
)
def test_what_is_wrong_is_said(name, changed, said, run):
    status, [line] = run(name, **{changed: first_is_off})
    assert status == 1
    assert line.endswith(said)


def test_what_fails_does_not_stop_the_others(run, monkeypatch):
    load = check_families.load

    def fails(name, **settings):
        if name == "gpt2":
            raise ValueError("no memory")
        return load(name, **settings)

    monkeypatch.setattr(check_families, "load", fails)
    status, lines = run("gpt2", "llama")
    assert status == 1
    assert lines[0].split(maxsplit=1) == ["gpt2", "ValueError: no memory"]
    assert lines[1].endswith("ok")
