"""One sequence on its way from prompt to finished output."""

from __future__ import annotations

import enum
from collections.abc import MutableSequence
from dataclasses import dataclass, field

from jaxinfer.outputs import FinishReason
from jaxinfer.sampling_params import SamplingParams

NO_PLACE = -1
"""The place of a request without an adapter."""


class Status(enum.Enum):
    """Where a request is: in the queue, holding a slot and pages, or done."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and how far it has come. `n` outputs of one prompt are n requests."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    """Prompt and output together may reach this many tokens."""
    seed: int
    index: int = 0
    """Which of the prompt's `n` outputs this is."""
    end_token_ids: frozenset[int] = frozenset()
    """The model's own end ids, unless ignored."""
    lora: str | None = None
    """The name of its adapter."""
    place: int = NO_PLACE
    """Of its adapter among the model's places for them, set when it is queued: until then it may be unloaded."""

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in the cache, or will be once the steps in flight are done."""
    num_unread: int = 0
    """Tokens that steps in flight sample: they count, their ids are not known yet."""
    steps_in_flight: int = 0
    slot: int = -1
    """Row of the device's last_ids while running."""
    pages: list[MutableSequence[int]] = field(default_factory=list)
    """Per cache group, the page of each page-sized piece of the sequence; −1 where its window has left it."""
    num_released: list[int] = field(default_factory=list)
    """Per cache group, how many leading pages its window has left."""
    num_prompt_scored: int = 0
    """Prompt rows whose log-probabilities have been read."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those still unread included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_unread

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def stopping_ids(self) -> frozenset[int]:
        """Ids that end it: the model's own and the caller's."""
        return self.end_token_ids | frozenset(self.params.stop_token_ids or ())

    @property
    def num_prompt_rows(self) -> int:
        """Prompt rows to score: with k alternatives the last row is left out, it belongs to the first new token."""
        if self.params.prompt_logprobs is None:
            return 0
        return len(self.prompt_token_ids) - (self.params.prompt_logprobs >= 0)

    def wants_every_row(self) -> bool:
        """Whether its next step must return logits that a sampling step does not keep."""
        return self.num_prompt_scored < self.num_prompt_rows or self.params.logprobs == -1

    def token_id(self, position: int) -> int | None:
        """The id at a position of prompt + output; None while unread."""
        prompt = len(self.prompt_token_ids)
        if position < prompt:
            return self.prompt_token_ids[position]
        output = position - prompt
        return self.output_token_ids[output] if output < len(self.output_token_ids) else None
