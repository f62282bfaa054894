"""Work in threads while the next thing is made: how much is made ahead, in what order, and what becomes of errors."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from convert import ahead
from convert.ahead import each_ahead, made_ahead


def test_everything_is_used_once_and_few_are_there_at_a_time():
    made, used, most, lock = 0, [], 0, threading.Lock()

    def things():
        nonlocal made, most
        for thing in range(40):
            made += 1
            most = max(most, made - len(used))
            yield thing

    def use(thing):
        with lock:
            used.append(thing)

    each_ahead(things(), use, workers=3)
    assert sorted(used) == list(range(40))
    assert most <= 3 + 1 + 1  # those in the pool, and the one just made


def test_the_next_is_made_while_one_is_used():
    begun = threading.Event()

    def things():
        yield 0
        begun.set()
        yield 1

    used = []
    each_ahead(things(), lambda thing: used.append(begun.wait(10)), workers=1)
    assert used == [True, True]


def test_an_error_ends_it():
    def use(thing):
        raise ValueError(f"thing {thing}")

    with pytest.raises(ValueError, match="thing 0"):
        each_ahead(range(1000), use, workers=1)


@pytest.mark.parametrize("early", [True, False])
def test_the_next_is_made_ahead_only_if_it_may_be(early):
    events, second = [], threading.Event()

    def make(thing):
        events.append(thing)
        if thing == 1:
            second.set()
        return 10 * thing

    got = []
    for thing, result in made_ahead([0, 1, 2], make, lambda thing: early):
        got.append((thing, result))
        if thing == 0:
            assert second.wait(10 if early else 0.05) is early
    assert got == [(0, 0), (1, 10), (2, 20)]
    assert events == [0, 1, 2]


class AtOnce(ThreadPoolExecutor):
    """Does what it is given before it returns."""

    def submit(self, fn, *args):
        future = super().submit(fn, *args)
        wait([future])
        return future


def test_several_are_made_ahead_as_far_as_they_are_small_together(monkeypatch):
    monkeypatch.setattr(ahead, "ThreadPoolExecutor", AtOnce)
    begun = []
    made = ahead.several_ahead([3, 4, 5, 20, 1, 2], begun.append, size=lambda size: size, most=12)
    seen = [(thing, list(begun)) for thing, _ in made]
    small, large = [3, 4, 5], [3, 4, 5, 20]
    assert seen == [(3, small), (4, small), (5, small), (20, large), (1, [*large, 1, 2]), (2, [*large, 1, 2])]


def test_an_error_of_one_that_is_made_ahead_is_raised_in_its_turn():
    made = ahead.several_ahead([1, 0, 2], lambda size: 1 // size, size=lambda size: size, most=12)
    assert next(made) == (1, 1)
    with pytest.raises(ZeroDivisionError):
        next(made)
