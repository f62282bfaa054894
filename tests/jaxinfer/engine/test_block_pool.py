"""Pages are free or held, never both, never lost, whatever the order of allocating, sharing and releasing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.engine.block_pool import BlockPool


class Pool(RuleBasedStateMachine):
    """Beside the pool, a bag of every reference given out."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7)
        self.held: Counter[int] = Counter()

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        free = 7 - len(self.held)
        pages = self.pool.allocate(count)
        if count > free:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == len(pages) == count
        assert not set(pages) & set(self.held)
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.share(page)
        self.held[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(page)
        self.held = self.held - Counter([page])

    @rule(page=st.integers(-8, 8))
    def pages_nobody_holds_are_refused(self, page):
        if page not in self.held:
            for act in (self.pool.share, self.pool.release):
                with pytest.raises(ValueError, match=f"page {page} is not in use \\(pool of 7\\)"):
                    act(page)

    @invariant()
    def a_page_is_free_or_held(self):
        assert self.pool.num_free == 7 - len(self.held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_freed_pages_wait_longest():
    """First freed, first reused: a page keeps its content, of use to prefix sharing, as long as the pool allows."""
    pool = BlockPool(4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    for page in (2, 0, 3):
        pool.release(page)
    assert pool.allocate(2) == [2, 0]
    pool.release(1)
    assert pool.allocate(2) == [3, 1]
    assert pool.allocate(1) is None
