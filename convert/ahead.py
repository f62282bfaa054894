"""Work on some things while the next are made."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

WORKERS = min(8, os.cpu_count() or 1)
"""Threads that fuse and transpose what one thread reads; copies release the interpreter's lock."""


def each_ahead[T](things: Iterable[T], use: Callable[[T], object], workers: int = WORKERS) -> None:
    """`use` of every thing, several at once and in any order, while this thread makes the next.

    At most `workers` + 1 of them are there at a time. Raises the first error, of either.
    """
    pending: deque[Future[object]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for thing in things:
            pending.append(pool.submit(use, thing))
            del thing
            if len(pending) > workers:
                pending.popleft().result()
        for future in pending:
            future.result()


def several_ahead[T, R](
    things: Iterable[T], make: Callable[[T], R], size: Callable[[T], int], most: int
) -> Iterator[tuple[T, R]]:
    """(thing, what `make` makes of it), in order; the next are made while the caller works on one.

    As many as are not larger than `most` together, by `size`, or one that is larger by itself.
    """
    waiting: deque[T] = deque(things)
    pending: deque[tuple[T, Future[R]]] = deque()
    left = most
    with ThreadPoolExecutor(WORKERS) as pool:
        while waiting or pending:
            while waiting and (not pending or size(waiting[0]) <= left):
                thing = waiting.popleft()
                left -= size(thing)
                pending.append((thing, pool.submit(make, thing)))
            thing, future = pending.popleft()
            made = future.result()
            yield thing, made
            del made
            left += size(thing)


def made_ahead[T, R](
    things: Sequence[T], make: Callable[[T], R], may_wait: Callable[[T], bool]
) -> Iterator[tuple[T, R]]:
    """(thing, what `make` makes of it); the next is made while the caller works on one, if it `may_wait` beside that.

    Otherwise it is made when the caller is done with the one before.
    """
    with ThreadPoolExecutor(1) as pool:
        early: Future[R] | None = None
        for thing, following in zip(things, [*things[1:], None]):
            made = (pool.submit(make, thing) if early is None else early).result()
            early = pool.submit(make, following) if following is not None and may_wait(following) else None
            yield thing, made
            del made
