"""What a caller gets back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """One token's log-probability under the model's raw distribution: no temperature, no filter."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None = None


type TokenLogprobs = list[dict[int, Logprob] | None] | np.ndarray
"""Per position, token id → Logprob, the position's own token included; or the whole vocabulary, [tokens, vocab] f32."""


@dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it; None for the model's own end id, a length limit, or an abort."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds of `time.monotonic`, and how often the request was preempted."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """A text and its vector."""

    prompt: str | None
    prompt_token_ids: list[int]
    """What was embedded: of a text that was truncated, what was left."""
    embedding: np.ndarray
    """[hidden_size] f32"""


@dataclass(frozen=True)
class TextDelta:
    """What one step added to a streamed continuation; `text` never ends within a character."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
