"""The engine on a simulated device: every schedule is checked, and every output is what the request gives alone."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.config import CacheGroup, EngineConfig, ModelConfig, RopeConfig
from jaxinfer.engine.batch import BatchBuilder
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.output import OutputBuilder
from jaxinfer.engine.request import Request, Status
from jaxinfer.engine.scheduler import RELEASED, Scheduled
from jaxinfer.outputs import Logprob
from jaxinfer.sampling_params import SamplingParams
from tests.jaxinfer.engine.simulated_device import VOCAB, SimulatedDevice, generate, visible


@dataclass(frozen=True)
class Arrival:
    """A request, and the steps before which it comes and is aborted."""

    prompt: list[int]
    limit: int
    """Prompt and output together."""
    step: int = 0
    ends: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    aborts: int | None = None


@dataclass(frozen=True)
class Workload:
    """What a simulation runs."""

    groups: tuple[CacheGroup, ...]
    num_pages: tuple[int, ...]
    engine: EngineConfig
    arrivals: list[Arrival]


class Simulation:
    """An engine on a simulated device, every schedule of its checked."""

    def __init__(self, workload: Workload):
        self.workload = workload
        groups = workload.groups
        spans = {"windows": tuple(group.window for group in groups), "chunks": tuple(group.chunk for group in groups)}
        model = ModelConfig("llama", VOCAB, 8, len(groups), 1, 1, 8, 8, 40, RopeConfig(), **spans)
        self.builder = BatchBuilder(workload.engine, len(groups), data_dependent=False)
        args = workload.groups, workload.num_pages, workload.engine.cache.page_size, workload.engine.max_num_seqs
        self.device = SimulatedDevice(*args)
        self.engine = Engine(model, workload.engine, self.device, self.builder, workload.num_pages, None)
        self.scheduler = self.engine.scheduler
        self.schedule = self.scheduler.schedule
        self.scheduler.schedule = self.checked_schedule
        self.accepted: dict[Request, Arrival] = {}
        self.outputs: dict[Request, OutputBuilder] = {}
        self.preempted: list[tuple[int, bool]] = []  # number, and whether its prompt was scored in part

    def checked_schedule(self) -> list[Scheduled]:
        s, before, free = self.scheduler, list(self.scheduler.running), [p.num_free for p in self.scheduler.pools]
        idle = [r for r in before if not s._pending(r)]
        scheduled = self.schedule()
        self.check_budget(scheduled)
        self.check_pages(scheduled)
        # Queue order is order of arrival, so whoever was admitted came first, and whoever was preempted was youngest.
        order = [int(r.request_id) for r in (*s.running, *s.waiting)]
        assert order == sorted(order)
        gone = [r for r in before if r.status is Status.WAITING]
        assert before[len(before) - len(gone) :] == gone
        self.preempted += [(int(r.request_id), 0 < r.num_prompt_scored < r.num_prompt_rows) for r in gone]
        if gone:
            assert min(free) < sum(part.count for part in scheduled) + s.page_size * len(gone)
            assert not [part for part in scheduled if part.request not in before], "admitted while preempting"
        # The oldest always gets on.
        if before and before[0] not in idle:
            assert scheduled
            assert scheduled[0].request is next(r for r in before if r not in idle)
        return scheduled

    def check_budget(self, scheduled: list[Scheduled]) -> None:
        s = self.scheduler
        total = sum(part.count for part in scheduled)
        scored = any(part.request.wants_every_row() for part in scheduled)
        assert total <= (s.max_scored_tokens if scored else s.max_num_batched_tokens)
        assert len({part.request for part in scheduled}) == len(scheduled)
        for part in scheduled:
            assert part.count >= 1
            assert part.start + part.count == part.request.num_computed
            known = part.request.num_tokens - part.samples
            assert part.samples == (part.start + part.count == known)
            assert part.request.num_tokens <= part.request.max_total_tokens

    def check_pages(self, scheduled: list[Scheduled]) -> None:
        s = self.scheduler
        slots = [r.slot for r in s.running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.workload.engine.max_num_seqs))
        assert all(r.slot == -1 and not any(r.pages) for r in s.waiting)
        for number, (group, pool) in enumerate(zip(s.groups, s.pools, strict=True)):
            held = [page for r in s.running for page in r.pages[number] if page != RELEASED]
            assert len(set(held)) == len(held), "a page held by two"
            assert len(held) + pool.num_free == pool.num_pages, "a page lost"
            for part in scheduled:
                pages = part.request.pages[number]
                assert len(pages) == -(-part.request.num_computed // s.page_size)
                first = visible(group, part.start)[0]
                for page in range(len(pages)):
                    # Needed by the first query of this part or a later one, or by none any more.
                    assert (pages[page] != RELEASED) == ((page + 1) * s.page_size > first)

    def run(self) -> None:
        """Until everything has finished."""
        arrivals = sorted(enumerate(self.workload.arrivals), key=lambda entry: entry[1].step)
        step = 0
        while arrivals or self.engine.has_unfinished:
            while arrivals and arrivals[0][1].step <= step:
                self.submit(*arrivals.pop(0))
            for request, arrival in self.accepted.items():
                if arrival.aborts == step:
                    self.engine.abort([request])
            self.engine.step()
            step += 1
            assert step < 2000, "does not finish"
        for _ in range(self.workload.engine.steps_in_flight):
            self.engine.step()  # reads what is still in flight, for nobody
        self.check_end()

    def submit(self, number: int, arrival: Arrival) -> None:
        params = SamplingParams(max_tokens=None, detokenize=False, logprobs=0, prompt_logprobs=arrival.prompt_logprobs)
        name = str(len(self.accepted))
        request = Request(name, arrival.prompt, params, arrival.limit, 1000 + number, end_token_ids=arrival.ends)
        if min(self.workload.num_pages) * self.scheduler.page_size < arrival.limit and self.is_refused(request):
            return
        self.outputs[request] = self.engine.add(request)
        self.accepted[request] = arrival

    def is_refused(self, request: Request) -> bool:
        """A window may still let it in."""
        try:
            self.engine.check(request)
        except ValueError as error:
            if f"may take {request.max_total_tokens} tokens" in str(error):
                return True
            raise
        return False

    def check_end(self) -> None:
        s = self.scheduler
        assert not s.has_unfinished
        assert [pool.num_free for pool in s.pools] == list(self.workload.num_pages)
        assert sorted(s._slots) == list(range(self.workload.engine.max_num_seqs))
        assert {batch.shape for batch in self.device.batches} <= set(self.builder.shapes())
        for request, arrival in self.accepted.items():
            assert request.finished
            self.check_output(request, arrival)

    def check_output(self, request: Request, arrival: Arrival) -> None:
        """As if it had been alone; the log-probabilities are those of the rows they belong to."""
        want = generate(arrival.prompt, request.seed, self.workload.groups, arrival.limit, arrival.ends)
        completion, size = self.outputs[request].completion(), len(arrival.prompt)
        if completion.finish_reason == "abort":
            assert arrival.aborts is not None
            want = want[: len(completion.token_ids)]
        else:
            assert request.steps_in_flight == request.num_unread == 0
            assert completion.finish_reason == ("stop" if want[-1] in arrival.ends else "length")
            if arrival.prompt_logprobs is not None:
                scored = self.outputs[request].prompt_logprobs()
                assert scored == [None, *({arrival.prompt[p + 1]: Logprob(float(p), 1)} for p in range(size - 1))]
        assert completion.token_ids == want
        assert completion.logprobs == [{token: Logprob(float(size + i - 1), 1)} for i, token in enumerate(want)]
