"""What a request has produced so far: ids, text, log-probabilities, times."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from jaxinfer.engine.detokenizer import Detokenizer
from jaxinfer.engine.request import Request
from jaxinfer.engine.sampler import RowLogprobs
from jaxinfer.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TextDelta,
    TokenLogprobs,
)
from jaxinfer.tokenizer import Tokenizer


class OutputBuilder:
    """Grows one request's output token by token, and says when it is done."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, request.params)
        self._logprobs: list[dict[int, Logprob] | NDArray[np.float32]] = []
        self._prompt_logprobs: list[dict[int, Logprob] | NDArray[np.float32]] = []
        self._told_ids = 0
        self._untold_text: list[str] = []
        self._arrival_time = time.monotonic()
        self._first_token_time: float | None = None
        self._finished_time: float | None = None
        self._error: Exception | None = None

    def add_prompt_rows(self, start: int, count: int, rows: RowLogprobs, full: NDArray[np.float32] | None) -> None:
        """Log-probabilities of prompt rows from `start`, alternatives or whole rows; those it has are skipped."""
        request, wanted = self.request, self.request.params.prompt_logprobs
        for i in range(max(0, request.num_prompt_scored - start), count):
            if full is not None:
                self._prompt_logprobs.append(full[i].copy())
            else:
                target = request.prompt_token_ids[start + i + 1]
                self._prompt_logprobs.append(_pick(rows, i, target, wanted or 0, self._tokenizer))
        request.num_prompt_scored = max(request.num_prompt_scored, start + count)

    def push(self, token_id: int, row: int, rows: RowLogprobs | None, full: NDArray | None) -> None:
        """Take in a sampled id; row: where in `rows` or `full` its log-probabilities are. May finish the request."""
        request, params = self.request, self.request.params
        request.output_token_ids.append(token_id)
        self._first_token_time = self._first_token_time or time.monotonic()
        if params.logprobs == -1 and full is not None:
            self._logprobs.append(full[row].copy())
        elif params.logprobs is not None and rows is not None:
            self._logprobs.append(_pick(rows, row, token_id, params.logprobs, self._tokenizer))
        if token_id in request.stopping_ids and len(request.output_token_ids) > params.min_tokens:
            self.finish("stop", None if token_id in request.end_token_ids else token_id)
            return
        self._untold_text.append(self._detokenizer.push(token_id))
        if self._detokenizer.stop_reason is not None:
            self.finish("stop", self._detokenizer.stop_reason)
        elif request.num_tokens - request.num_unread >= request.max_total_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """No more tokens: text that was held back comes out."""
        self.request.finish_reason, self.request.stop_reason = reason, stop_reason
        self._untold_text.append(self._detokenizer.finish())
        self._finished_time = time.monotonic()

    def fail(self, error: Exception) -> None:
        """No more tokens: they cannot be taken in."""
        self.request.finish_reason, self._error = "abort", error
        self._finished_time = time.monotonic()

    def check(self) -> None:
        """Raises what made it fail."""
        if self._error is not None:
            raise self._error

    def take_delta(self) -> TextDelta:
        """What came since the last call."""
        new_ids = self.request.output_token_ids[self._told_ids :]
        text, self._untold_text = "".join(self._untold_text), []
        self._told_ids += len(new_ids)
        return TextDelta(self.request.index, text, new_ids, self.request.finish_reason, self.request.stop_reason)

    def completion(self) -> CompletionOutput:
        request = self.request
        logprobs = _gather(self._logprobs, request.params.logprobs)
        ids, reasons = list(request.output_token_ids), (request.finish_reason, request.stop_reason)
        return CompletionOutput(request.index, self._detokenizer.text, ids, *reasons, logprobs)

    def prompt_logprobs(self) -> TokenLogprobs | None:
        rows = _gather(self._prompt_logprobs, self.request.params.prompt_logprobs)
        return [None, *rows] if isinstance(rows, list) else rows

    def metrics(self) -> RequestMetrics:
        times = (self._arrival_time, self._first_token_time, self._finished_time)
        return RequestMetrics(*times, num_preemptions=self.request.num_preemptions)


def request_output(text: str | None, outputs: list[OutputBuilder]) -> RequestOutput:
    """Of one prompt; text: None if it came as ids; outputs: all of its own."""
    first = outputs[0].request
    return RequestOutput(
        request_id=first.request_id,
        prompt=text,
        prompt_token_ids=first.prompt_token_ids,
        outputs=[output.completion() for output in outputs],
        finished=all(output.request.finished for output in outputs),
        metrics=outputs[0].metrics(),
        prompt_logprobs=outputs[0].prompt_logprobs(),
    )


def _pick(rows: RowLogprobs, i: int, token_id: int, count: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The `count` most likely ids of row i, and its own."""

    def entry(other: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_text(other) if tokenizer else None)

    result = {token_id: entry(token_id, float(rows.chosen[i]), int(rows.rank[i]))}
    for rank in range(count):
        other, logprob = int(rows.top_ids[i, rank]), float(rows.top[i, rank])
        if other not in result and logprob > -np.inf:
            result[other] = entry(other, logprob, rank + 1)
    return result


def _gather(rows: list[dict[int, Logprob] | NDArray[np.float32]], wanted: int | None) -> TokenLogprobs | None:
    if wanted is None:
        return None
    return np.stack(rows).astype(np.float32) if wanted == -1 and rows else list(rows)  # type: ignore[arg-type]
