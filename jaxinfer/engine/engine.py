"""The loop: schedule, run, postprocess, with steps in flight."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.batch import BatchBuilder
from jaxinfer.engine.interrupts import interrupts_held
from jaxinfer.engine.output import OutputBuilder
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampler import RowLogprobs
from jaxinfer.engine.scheduler import Scheduled, Scheduler
from jaxinfer.engine.step import StepOutput, StepRunner
from jaxinfer.outputs import TextDelta
from jaxinfer.sampling_params import MAX_SUPPRESSED
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True)
class StepInFlight:
    """A dispatched step: what it computes for whom."""

    scheduled: list[Scheduled]
    output: StepOutput
    scored: bool


class Engine:
    """Runs requests until they finish. Knows nothing of text prompts or devices.

    Threads may share it: one call at a time changes anything, and a step advances everybody's requests.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        runner: StepRunner,
        builder: BatchBuilder,
        num_pages: tuple[int, ...],
        tokenizer: Tokenizer | None,
    ):
        """config: canonical or laid out for a mesh; num_pages: per cache group."""
        self._config = config
        self._engine = engine
        self._runner = runner
        self._builder = builder
        self._tokenizer = tokenizer
        self._outputs: dict[Request, OutputBuilder] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._lock = threading.RLock()
        self._stepping = False
        self._to_abort: list[Request] = []
        self.scheduler = Scheduler(
            groups=config.cache_groups,
            num_pages=num_pages,
            page_size=engine.cache.page_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_scored_tokens=builder.max_scored_tokens,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._outputs)

    def places_in_use(self) -> set[int]:
        """Those of the adapters that unfinished requests have."""
        with self._lock:
            return {request.place for request in self._outputs}

    @interrupts_held()
    def add(self, request: Request) -> OutputBuilder:
        """Queue a request that `check` accepts."""
        with self._lock:
            output = OutputBuilder(request, self._tokenizer)  # first, for a tokenizer may fail
            self.scheduler.add(request)
            self._outputs[request] = output
            return output

    @interrupts_held()
    def abort(self, requests: Iterable[Request]) -> None:
        """End requests now and free their pages; those that are finished are left alone.

        Within a step, where the garbage collector may close a stream, it waits for the step's end.
        """
        with self._lock:
            self._to_abort += requests
            if not self._stepping:
                self._abort()

    def _abort(self) -> None:
        requests, self._to_abort = self._to_abort, []
        outputs = [output for request in requests if (output := self._outputs.pop(request, None))]
        for output in outputs:
            self.scheduler.finish(output.request)
        for output in outputs:
            output.finish("abort")

    def take_delta(self, output: OutputBuilder) -> TextDelta:
        """What a request produced since it was last asked. Raises what made it fail."""
        with self._lock:
            output.check()
            return output.take_delta()

    @interrupts_held()
    def step(self) -> list[OutputBuilder]:
        """Dispatch a step, and read the oldest one once enough are in flight. Returns the outputs that grew.

        A step that fails raises, and is as if it had not been: requests that the caller does not abort are computed
        again, by whoever steps next. What fails for one request alone fails that one (`OutputBuilder.check`).
        """
        with self._lock:
            self._stepping = True
            try:
                if scheduled := self.scheduler.schedule():
                    self._in_flight.append(self._dispatch(scheduled))
                if self._in_flight and (not scheduled or len(self._in_flight) >= self._engine.steps_in_flight):
                    return self._postprocess()
                return []
            finally:
                self._stepping = False
                self._abort()

    def _dispatch(self, scheduled: list[Scheduled]) -> StepInFlight:
        try:
            batch = self._builder.build(scheduled)
            return StepInFlight(scheduled, self._runner.run(batch), batch.shape.scored)
        except BaseException:
            self.scheduler.give_up(scheduled)
            raise

    def _postprocess(self) -> list[OutputBuilder]:
        """Read the oldest step's result and hand each sequence its part. Ids past a stop are dropped."""
        step = self._in_flight.popleft()
        try:
            ids, rows, full = _read(step)
        except BaseException:
            for lost in (step, *self._in_flight):  # the later ones go on from what this one computed
                self.scheduler.give_up(lost.scheduled)
            self._in_flight.clear()
            raise
        grown, row = [], 0
        for number, part in enumerate(step.scheduled):
            request = part.request
            request.steps_in_flight -= 1
            request.num_unread -= part.samples
            output = self._outputs.get(request)
            if output is not None:
                try:
                    if step.scored and rows is not None:
                        _add_prompt_rows(output, part, row, rows, full)
                    if part.samples:
                        last = row + part.count - 1 if step.scored else number
                        output.push(int(ids[number]), last, rows, full)
                        grown.append(output)
                except Exception as error:  # of the tokenizer's, say; the neighbours' tokens are still to be handed out
                    output.fail(error)
                if request.finish_reason is not None:
                    del self._outputs[request]
                    self.scheduler.finish(request)
            row += part.count
        return grown

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that cannot be served: nothing is queued or computed."""
        prompt, vocab = request.prompt_token_ids, self._config.vocab_size
        if not prompt:
            raise ValueError(f"request {request.request_id} has an empty prompt; give it at least one token")
        if outside := [token_id for token_id in prompt if not 0 <= token_id < vocab]:
            raise ValueError(
                f"request {request.request_id}: token ids {outside[:5]} are outside the vocabulary of {vocab}"
            )
        if outside := [token_id for token_id in request.params.stop_token_ids or () if not 0 <= token_id < vocab]:
            raise ValueError(f"stop_token_ids {outside[:5]} are outside the vocabulary of {vocab}")
        if len(prompt) >= self._engine.max_model_len:
            raise ValueError(
                f"request {request.request_id}: the prompt has {len(prompt)} tokens, and max_model_len is "
                f"{self._engine.max_model_len}, output included; shorten it or raise max_model_len"
            )
        if request.params.stop_strings and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this LLM has none; pass stop_token_ids instead")
        if request.params.min_tokens and len(request.stopping_ids) > MAX_SUPPRESSED:
            raise ValueError(
                f"min_tokens holds back {len(request.stopping_ids)} end and stop ids, at most {MAX_SUPPRESSED} are "
                "possible; pass fewer stop_token_ids"
            )
        self.scheduler.check(request)


def _read(step: StepInFlight) -> tuple[np.ndarray, RowLogprobs | None, np.ndarray | None]:
    """Its ids, and what log-probabilities its requests want: of rows, and whole rows."""
    ids = np.asarray(step.output.ids)
    params = [part.request.params for part in step.scheduled]
    wants_rows = any(p.logprobs is not None or p.prompt_logprobs is not None for p in params)
    rows = jax.device_get(step.output.row_logprobs) if wants_rows else None
    wants_full = step.scored and any(-1 in (p.logprobs, p.prompt_logprobs) for p in params)
    return ids, rows, np.asarray(step.output.logprobs) if wants_full else None


def _add_prompt_rows(
    output: OutputBuilder, part: Scheduled, row: int, rows: RowLogprobs, full: np.ndarray | None
) -> None:
    """The rows of this chunk that belong to the prompt, if its log-probabilities are wanted."""
    request = part.request
    count = min(part.start + part.count, request.num_prompt_rows) - part.start
    if count <= 0:
        return
    chunk = jax.tree.map(lambda leaf: leaf[row : row + count], rows)
    whole = full[row : row + count] if request.params.prompt_logprobs == -1 and full is not None else None
    output.add_prompt_rows(part.start, count, chunk, whole)
