"""Which sequences run in the next step, and on which pages.

First come, first served. Running sequences go first, oldest first; when one needs a page and none is free, the youngest
is preempted: its pages are freed and it is computed again later from its tokens. A request that could not finish
alone in the pool is refused when it is added, so the oldest always gets on and nothing deadlocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.config import CacheGroup
from jaxinfer.engine.block_pool import BlockPool
from jaxinfer.engine.request import Request, Status

RELEASED = -1
"""Stands in a request's page list where the page was given back, its tokens being out of the window or the chunk."""


@dataclass(frozen=True)
class Scheduled:
    """One sequence's part of a step: its tokens from `start`, `count` of them."""

    request: Request
    start: int
    count: int
    samples: bool
    """Whether these are its last known tokens, so that the next one is sampled."""


class Scheduler:
    """Holds every unfinished request. Works on counts alone: no arrays, no device."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_pages: tuple[int, ...],
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_scored_tokens: int,
    ):
        """num_pages: per cache group. max_scored_tokens: budget of a step that returns every row's logits."""
        self.groups = groups
        self.pools = [BlockPool(pages) for pages in num_pages]
        self.page_size = page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_scored_tokens = max_scored_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(reversed(range(max_num_seqs)))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> None:
        """Raises ValueError if the request could never finish, even alone in the pool."""
        for group, pool in zip(self.groups, self.pools, strict=True):
            needed = self._most_pages(group, request.max_total_tokens)
            if needed > pool.num_pages:
                raise ValueError(
                    f"request {request.request_id} may take {request.max_total_tokens} tokens, {needed} pages of "
                    f"{self.page_size}, and the cache has {pool.num_pages}; lower max_tokens or max_model_len, "
                    "shorten the prompt, or raise num_pages or memory_fraction"
                )

    def add(self, request: Request) -> None:
        """Queue a request that `check` accepts."""
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        """The next step's sequences, their pages allocated; empty when nothing can run now."""
        scheduled: list[Scheduled] = []
        preempted = False
        limit, used = self._limit(self.running), 0
        for request in list(self.running):
            count = min(self._pending(request), limit - used)
            if request.status is not Status.RUNNING or not count:
                continue
            while not (fits := self._allocate(request, request.num_computed + count)):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if fits:
                scheduled.append(self._advance(request, count))
                used += count
        while self.waiting and not preempted and self._slots:
            request = self.waiting[0]
            limit = min(limit, self._limit([request]))
            count = min(self._pending(request), limit - used)
            if count < 1 or request.steps_in_flight or not self._fits(request) or not self._allocate(request, count):
                break
            self.waiting.popleft()
            request.status, request.slot = Status.RUNNING, self._slots.pop()
            self.running.append(request)
            scheduled.append(self._advance(request, count))
            used += count
        return scheduled

    def give_up(self, scheduled: Iterable[Scheduled]) -> None:
        """A step that failed computed nothing: whoever runs is computed again from its tokens."""
        for part in scheduled:
            part.request.steps_in_flight -= 1
            part.request.num_unread -= part.samples
        while self.running:
            self._preempt(self.running[-1])

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds. Steps in flight may still write to its pages:
        they come before any step that is given those pages next."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._free(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def _limit(self, requests: Iterable[Request]) -> int:
        """Most tokens of a step that these requests are part of."""
        scored = any(request.wants_every_row() for request in requests)
        return self.max_scored_tokens if scored else self.max_num_batched_tokens

    def _pending(self, request: Request) -> int:
        """Tokens to compute; none once the last allowed token is sampled, be it still unread."""
        if request.num_tokens >= request.max_total_tokens:
            return 0
        return request.num_tokens - request.num_computed

    def _advance(self, request: Request, count: int) -> Scheduled:
        start = request.num_computed
        request.num_computed += count
        request.steps_in_flight += 1
        samples = request.num_computed == request.num_tokens
        request.num_unread += samples
        return Scheduled(request, start, count, samples)

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, to be computed again from its tokens."""
        self.running.remove(request)
        self._free(request)
        request.status, request.num_computed = Status.WAITING, 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        for pool, pages in zip(self.pools, request.pages, strict=True):
            for page in pages:
                if page != RELEASED:
                    pool.release(page)
        request.pages, request.num_released = [], []
        self._slots.append(request.slot)
        request.slot = -1

    def _fits(self, request: Request) -> bool:
        """Whether all its tokens find pages now, with one left for every running sequence to grow into."""
        return all(
            self._most_pages(group, request.num_tokens) + len(self.running) <= pool.num_free
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        """Give it pages for its first `num_tokens` tokens, in all groups or none; free what its windows have left."""
        if not request.pages:  # arrays, which a batch copies whole: a long sequence has thousands of pages
            request.pages = [array("i") for _ in self.groups]
            request.num_released = [0] * len(self.groups)
        last = -(-num_tokens // self.page_size)
        for g, (group, pool, pages) in enumerate(zip(self.groups, self.pools, request.pages, strict=True)):
            first = min(self._first_page(group, request.num_computed), len(pages))
            for number in range(request.num_released[g], first):
                pool.release(pages[number])
                pages[number] = RELEASED
            request.num_released[g] = max(first, request.num_released[g])
        missing = [last - len(pages) for pages in request.pages]
        if any(count > pool.num_free for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for pool, pages, count in zip(self.pools, request.pages, missing, strict=True):
            if count > 0:
                pages.extend(pool.allocate(count) or [])
        return True

    def _first_page(self, group: CacheGroup, position: int) -> int:
        """The first page that a query at `position` or later can still see."""
        return group.first_seen(position) // self.page_size

    def _most_pages(self, group: CacheGroup, num_tokens: int) -> int:
        return group.most_pages(num_tokens, self.page_size, self.max_num_batched_tokens)
