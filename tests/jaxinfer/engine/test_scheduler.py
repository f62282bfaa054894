"""The scheduler, by hand-traced schedules and under random workloads on a device that checks every read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import CacheConfig, CacheGroup, EngineConfig
from jaxinfer.engine.request import Request, Status
from jaxinfer.engine.scheduler import RELEASED, Scheduler
from jaxinfer.sampling_params import SamplingParams
from tests.jaxinfer.engine.simulated_device import VOCAB
from tests.jaxinfer.engine.simulation import Arrival, Simulation, Workload

FULL, WINDOW = CacheGroup(None, (0,)), CacheGroup(6, (1,))


def scheduler(num_pages=(10,), page_size=4, seqs=3, tokens=8, scored=4, groups=(FULL,)):
    return Scheduler(groups, num_pages, page_size, seqs, tokens, scored)


def request(name, prompt, most=1000, **params):
    return Request(name, [1] * prompt, SamplingParams(max_tokens=None, **params), most, seed=0)


def shown(scheduled):
    """Name → (start, count, samples)."""
    return {part.request.request_id: (part.start, part.count, part.samples) for part in scheduled}


def read(scheduled):
    """A step's result has come: every sampled id is known."""
    for part in scheduled:
        part.request.steps_in_flight -= 1
        if part.samples:
            part.request.num_unread -= 1
            part.request.output_token_ids.append(2)


def run(s, *requests):
    for made in requests:
        s.add(made)
    scheduled = s.schedule()
    read(scheduled)
    return shown(scheduled)


def test_prompts_are_cut_to_the_budget_and_mix_with_decodes():
    s = scheduler(num_pages=(50,))
    assert run(s, request("a", 5), request("b", 11), request("c", 2)) == {"a": (0, 5, True), "b": (0, 3, False)}
    assert run(s) == {"a": (5, 1, True), "b": (3, 7, False)}
    assert run(s) == {"a": (6, 1, True), "b": (10, 1, True), "c": (0, 2, True)}
    assert run(s) == {"a": (7, 1, True), "b": (11, 1, True), "c": (2, 1, True)}


def test_a_step_in_flight_counts_as_done():
    """The next step is scheduled before the first one's id is known, and no further than the last allowed token."""
    s, a = scheduler(), request("a", 3, most=5)
    s.add(a)
    first, second = s.schedule(), s.schedule()
    assert (shown(first), shown(second)) == ({"a": (0, 3, True)}, {"a": (3, 1, True)})
    assert (a.num_unread, a.steps_in_flight, a.token_id(3)) == (2, 2, None)
    assert s.schedule() == []
    read(first)
    assert a.token_id(3) == 2
    assert s.schedule() == []


def test_admission_is_first_come_first_served():
    """Where the next in line does not fit, a smaller one behind it waits too; slots run out as pages do."""
    s = scheduler(num_pages=(4,), tokens=64)
    assert run(s, request("a", 4), request("big", 12), request("small", 1)) == {"a": (0, 4, True)}
    assert [r.request_id for r in s.waiting] == ["big", "small"]
    s = scheduler(num_pages=(50,), tokens=64, seqs=2)
    assert set(run(s, request("a", 1), request("b", 1), request("c", 1))) == {"a", "b"}
    s.finish(s.running[0])
    assert set(run(s)) == {"b", "c"}


def test_admission_leaves_a_page_for_every_running_sequence():
    s = scheduler(num_pages=(5,), tokens=64)
    assert set(run(s, request("a", 4), request("b", 8), request("c", 4))) == {"a", "b"}
    s = scheduler(num_pages=(6,), tokens=64)
    assert set(run(s, request("a", 4), request("b", 8), request("c", 4))) == {"a", "b", "c"}


def test_the_youngest_is_preempted_and_computed_again_from_its_tokens():
    s = scheduler(num_pages=(5,), tokens=64)
    a, b, c = (request(name, size) for name, size in (("a", 7), ("b", 3), ("c", 20)))
    assert run(s, a, b) == {"a": (0, 7, True), "b": (0, 3, True)}
    s.add(c)
    assert run(s) == {"a": (7, 1, True), "b": (3, 1, True)}
    for step in range(4):
        assert run(s) == {"a": (8 + step, 1, True), "b": (4 + step, 1, True)}
    assert (len(a.pages[0]), len(b.pages[0]), s.pools[0].num_free) == (3, 2, 0)
    # Both need a page and none is free: the younger one gives way, though the older one needed it first.
    assert run(s) == {"a": (12, 1, True)}
    assert (b.status, b.num_computed, b.pages, b.slot, b.num_preemptions) == (Status.WAITING, 0, [], -1, 1)
    assert [r.request_id for r in s.waiting] == ["b", "c"]
    s.finish(a)
    assert run(s) == {"b": (0, 9, True)}


def test_a_youngest_that_needs_a_page_gives_way_itself_and_nobody_takes_its_place():
    s = scheduler(num_pages=(4,), tokens=64)
    a, b = request("a", 7), request("b", 4)
    assert run(s, a, b) == {"a": (0, 7, True), "b": (0, 4, True)}
    assert run(s) == {"a": (7, 1, True), "b": (4, 1, True)}
    s.add(request("c", 1))
    assert run(s) == {"a": (8, 1, True)}  # takes the last page, with b's
    assert [r.request_id for r in s.waiting] == ["b", "c"]
    assert (s.pools[0].num_free, b.num_preemptions) == (1, 1)


def test_a_preempted_request_waits_for_its_steps_in_flight():
    """Its newest ids are on the device alone until they are read; its place in the queue is kept."""
    s = scheduler(num_pages=(3,), tokens=64)
    a, b = request("a", 4), request("b", 3)
    s.add(a)
    s.add(b)
    steps = [s.schedule() for _ in range(3)]
    assert shown(steps[2]) == {"a": (5, 1, True)}
    assert (b.status, b.steps_in_flight, b.num_unread) == (Status.WAITING, 2, 2)
    s.finish(a)
    s.add(request("c", 1))
    assert s.schedule() == []
    read([part for part in steps[0] if part.request is b])
    assert s.schedule() == []
    read([part for part in steps[1] if part.request is b])
    assert shown(s.schedule()) == {"b": (0, 5, True)}


def test_scored_steps_have_a_budget_of_their_own():
    s = scheduler(num_pages=(50,), tokens=16, scored=6)
    plain, scored = request("plain", 4), request("scored", 9, prompt_logprobs=1)
    assert run(s, plain, scored) == {"plain": (0, 4, True), "scored": (0, 2, False)}
    scored.num_prompt_scored = 2
    assert run(s, request("later", 9)) == {"plain": (4, 1, True), "scored": (2, 5, False)}
    scored.num_prompt_scored = 8
    assert run(s) == {"plain": (5, 1, True), "scored": (7, 2, True), "later": (0, 9, True)}
    everything = request("everything", 20, logprobs=-1)
    s.finish(plain)
    assert run(s, everything) == {"scored": (9, 1, True), "later": (9, 1, True), "everything": (0, 4, False)}


def test_pages_leave_with_the_window():
    """Window 6 of pages of 4: a query at 9 sees 4 to 9, one at 8 sees 3 too."""
    s = scheduler(num_pages=(9, 9), groups=(FULL, WINDOW))
    a = request("a", 8)
    run(s, a)
    first = a.pages[1][0]
    assert run(s) == {"a": (8, 1, True)}
    assert a.pages[1][0] == first
    run(s)
    assert a.pages[1][0] == RELEASED
    assert [pool.num_free for pool in s.pools] == [6, 7]
    s.finish(a)
    assert [pool.num_free for pool in s.pools] == [9, 9]


def test_pages_leave_with_the_chunk():
    """Chunks of 6 in pages of 4: position 6, where one starts, is on the second page, and 12 on the fourth."""
    s = scheduler(num_pages=(9, 9), groups=(FULL, CacheGroup(None, (1,), chunk=6)))
    a = request("a", 4)
    held = []
    while a.num_tokens < 15:
        run(s, a) if a.num_tokens == 4 else run(s)
        held.append((a.num_computed - 1, [page != RELEASED for page in a.pages[1]]))
    assert held[1:3] == [(4, [True, True]), (5, [True, True])]
    assert held[3:5] == [(6, [False, True]), (7, [False, True])]
    assert held[5:9] == [(position, [False, True, True]) for position in range(8, 12)]
    assert held[9:] == [(position, [False, False, False, True]) for position in range(12, 14)]


def test_a_request_is_in_all_groups_or_in_none():
    s = scheduler(num_pages=(9, 1), groups=(FULL, WINDOW), tokens=64)
    assert run(s, request("a", 5)) == {}
    assert [pool.num_free for pool in s.pools] == [9, 1]


@pytest.mark.parametrize(("tokens", "fits"), [(40, True), (41, False)])
def test_a_request_that_cannot_fit_alone_is_refused(tokens, fits):
    s = scheduler()
    if fits:
        s.check(request("big", 3, most=tokens))
        return
    message = (
        "request big may take 41 tokens, 11 pages of 4, and the cache has 10; lower max_tokens or max_model_len, "
        "shorten the prompt, or raise num_pages or memory_fraction"
    )
    with pytest.raises(ValueError, match=message):
        s.check(request("big", 3, most=tokens))


def test_a_windowed_group_bounds_what_a_request_may_take():
    """5 tokens of window before a step of 8: at most 5 pages of 4, however long it gets."""
    s = scheduler(num_pages=(5,), groups=(WINDOW,))
    s.check(request("long", 3, most=10**6))
    s = scheduler(num_pages=(4,), groups=(WINDOW,))
    s.check(request("short", 3, most=16))
    with pytest.raises(ValueError, match="may take 17 tokens, 5 pages of 4, and the cache has 4"):
        s.check(request("long", 3, most=17))
    with pytest.raises(ValueError, match="may take 1000 tokens, 5 pages of 4, and the cache has 4"):
        scheduler(num_pages=(4,), groups=(CacheGroup(None, (0,), chunk=6),)).check(request("long", 3, most=1000))


def test_finishing_takes_a_request_out_wherever_it_is():
    s = scheduler(num_pages=(3,), tokens=64)
    a, b = request("a", 4), request("b", 9)
    run(s, a, b)
    assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
    for made in (b, a):
        s.finish(made)
        s.finish(made)
        assert made.finished
    assert not s.has_unfinished
    assert s.pools[0].num_free == 3


@st.composite
def workloads(draw):
    page_size = draw(st.sampled_from([1, 2, 4]))
    span = st.none() | st.integers(1, 12)
    spans = draw(st.lists(st.tuples(span, st.just(None) | span), min_size=1, max_size=3, unique=True))
    seqs = draw(st.integers(1, 5))
    engine = EngineConfig(
        max_model_len=40,
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(seqs, 16)),
        steps_in_flight=draw(st.integers(1, 3)),
        cache=CacheConfig(page_size=page_size),
    )
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=18))
        requests.append(
            Arrival(
                prompt,
                limit=min(40, len(prompt) + draw(st.integers(1, 24))),
                ends=frozenset(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
                prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
                step=draw(st.integers(0, 8)),
                aborts=draw(st.sampled_from([None] * 5 + [1, 3, 8, 16])),
            )
        )
    num_pages = tuple(draw(st.integers(-(-16 // page_size), 44 // page_size)) for _ in spans)
    groups = tuple(CacheGroup(window, (i,), chunk) for i, (window, chunk) in enumerate(spans))
    return Workload(groups, num_pages, engine, requests)


@settings(max_examples=200)
@given(workloads())
def test_any_workload_finishes_with_every_read_right_and_every_page_back(workload):
    Simulation(workload).run()


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (3, None, 9)])
def test_a_crowded_pool_preempts_and_disturbs_nobody(steps_in_flight, windows):
    """Eight long requests in a pool for two: many preemptions, and the same ids as alone."""
    groups = tuple(CacheGroup(window, (i,)) for i, window in enumerate(windows))
    arrivals = [Arrival([n + 1] * (3 + n), limit=36, step=n) for n in range(8)]
    assert len(crowded(groups, 13, 12, 5, steps_in_flight, arrivals).preempted) >= 3


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_a_prompt_preempted_while_it_is_scored_is_scored_once(steps_in_flight):
    """Two short ones grow and take the pages of a long prompt that gets one token a step."""
    arrivals = [Arrival([n + 1] * size, limit=30, prompt_logprobs=0) for n, size in enumerate((1, 1, 24))]
    simulation = crowded((FULL,), 10, 3, 3, steps_in_flight, arrivals)
    assert (2, True) in simulation.preempted


def crowded(groups, pages, tokens, seqs, steps_in_flight, arrivals):
    engine = EngineConfig(40, seqs, tokens, steps_in_flight, cache=CacheConfig(page_size=4))
    simulation = Simulation(Workload(groups, (pages,) * len(groups), engine, arrivals))
    simulation.run()
    return simulation
