"""A step or a request that fails: whoever called hears of it, and nobody else loses a token, a page or a slot."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxinfer import SamplingParams
from jaxinfer.engine import engine as engine_module
from tests.jaxinfer.conftest import assert_idle

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=40)
ALPHABET = "abcdefghijklmnopqrstuvwxyz" * 3


class Failing:
    """Fails in the calls that `fails` says."""

    def __init__(self, call, fails):
        self._call, self._fails = call, fails

    def __call__(self, *args):
        if self._fails(*args):
            raise RuntimeError("out of memory")
        return self._call(*args)


def nth(number):
    count = itertools.count(1)
    return lambda *_: next(count) == number


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


PLACES = {
    "build": lambda engine: (engine._builder, "build"),
    "dispatch": lambda engine: (engine._runner, "run"),
    "read": lambda engine: (engine_module, "_read"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_step_that_fails_is_as_if_it_had_not_been(place, number, successor, monkeypatch):
    stream = successor.stream("a", LONG)
    heard = [next(stream).text, next(stream).text]
    with monkeypatch.context() as patch:
        target, name = PLACES[place](successor.engine)
        patch.setattr(target, name, Failing(getattr(target, name), nth(number)))
        with pytest.raises(RuntimeError, match="out of memory"):
            successor.generate(list("amqxz"), LONG)
    heard += [delta.text for delta in stream]
    assert "".join(heard) == ALPHABET[1:41]
    assert_idle(successor)
    assert texts(successor.generate(["a", "m"], GREEDY)) == ["bcdefghi", "nopqrstu"]


def test_what_fails_for_one_request_fails_that_one(successor, monkeypatch):
    """Its tokenizer does, at a token that the others do not have."""
    tokenizer = successor.tokenizer
    seven = tokenizer.encode("7")[-1]
    streams = [successor.stream("a", LONG), successor.stream("6", LONG), successor.stream("m", LONG)]
    heard = [[next(stream).text] for stream in (streams[0], streams[2])]
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "renders", Failing(tokenizer.renders, lambda token_id, *_: token_id == seven))
        for stream, told in zip((streams[0], streams[2]), heard, strict=True):
            told += [next(stream).text]
        with pytest.raises(RuntimeError, match="out of memory"):
            list(streams[1])
        with pytest.raises(RuntimeError, match="out of memory"):
            successor.generate(["a", "5"], LONG)
    for stream, told, first in zip((streams[0], streams[2]), heard, "am", strict=True):
        told += [delta.text for delta in stream]
        start = ALPHABET.index(first) + 1
        assert "".join(told) == ALPHABET[start : start + 40]
    assert_idle(successor)


def test_a_request_that_cannot_be_queued_leaves_nothing(successor, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(successor.tokenizer, "decode", Failing(successor.tokenizer.decode, nth(3)))
        with pytest.raises(RuntimeError, match="out of memory"):
            successor.generate(["a", "m", "q"], GREEDY)
    assert_idle(successor)


def test_a_stream_that_is_closed_within_a_step_ends_after_it(successor, monkeypatch):
    """As the garbage collector closes one, wherever it runs."""
    gone, kept = successor.stream("m", LONG), successor.stream("a", LONG)
    next(gone)
    heard = [next(kept).text]
    with monkeypatch.context() as patch:
        builder, build = successor.engine._builder, successor.engine._builder.build
        patch.setattr(builder, "build", lambda scheduled: (gone.close(), build(scheduled))[1])
        heard += [next(kept).text, next(kept).text]
    assert len(successor.engine._outputs) == 1
    heard += [delta.text for delta in kept]
    assert "".join(heard) == ALPHABET[1:41]
    assert_idle(successor)


def test_threads_outlive_each_others_failures(successor, monkeypatch):
    """Eight of them, some of whose steps fail, some of which leave their streams."""
    chance, lock = random.Random(0), threading.Lock()

    def fails(*_):
        with lock:
            return chance.random() < 0.03

    def caller(seed):
        choose, whole = random.Random(seed), 0
        for _ in range(6):
            first, length = choose.choice("abcdef"), choose.randrange(1, 30)
            params = SamplingParams(temperature=0.0, max_tokens=length)
            start = ALPHABET.index(first) + 1
            try:
                if choose.random() < 0.5:
                    assert texts(successor.generate(first, params)) == [ALPHABET[start : start + length]]
                    whole += 1
                    continue
                stream = successor.stream(first, params)
                told = "".join(delta.text for delta in itertools.islice(stream, choose.randrange(1, 30)))
                assert ALPHABET[start : start + length].startswith(told)
                assert told
                stream.close()
            except RuntimeError:
                continue
        return whole

    engine = successor.engine
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", Failing(engine._runner.run, fails))
        with ThreadPoolExecutor(8) as pool:
            whole = [future.result(timeout=60) for future in [pool.submit(caller, seed) for seed in range(8)]]
    assert sum(whole) > 5
    assert_idle(successor)
