"""What a caller may ask of one generation. Names and defaults are vLLM's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_LOGPROBS = 20
"""Alternatives per position that `logprobs` and `prompt_logprobs` can list; −1 gives the whole vocabulary instead."""
MAX_CHOICES = 1024
"""Outputs per prompt."""
MAX_SUPPRESSED = 32
"""Ids that `min_tokens` can hold back at once: the model's end ids and `stop_token_ids` together."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next tokens and when to stop; checked when made (ValueError)."""

    n: int = 1
    """Outputs per prompt, drawn independently."""
    temperature: float = 1.0
    """0: greedy. Logits are divided by it first, then min_p, top_k and top_p filter."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities reach this sum; 1: all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or −1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability."""
    seed: int | None = None
    """The same seed gives the same output, whoever shares the batch. None: drawn from the engine's seed."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; they are left out of it unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the output, besides the model's own end ids."""
    ignore_eos: bool = False
    """Go on past the model's end ids."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the engine's max_model_len."""
    min_tokens: int = 0
    """Tokens to generate before any end or stop id may be chosen, or a stop string may match."""
    logprobs: int | None = None
    """Alternatives to report per new token, 0 to 20, besides the chosen one; −1: the whole vocabulary, an array."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        check = self._check
        check("n", 1 <= self.n <= MAX_CHOICES, f"between 1 and {MAX_CHOICES}")
        check("temperature", 0.0 <= self.temperature < float("inf"), "0 (greedy) or a positive finite number")
        check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        check("top_k", self.top_k >= -1, "at least 1, or 0 or -1 to keep all tokens")
        check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        check("seed", self.seed is None or 0 <= self.seed < 2**32, "between 0 and 2**32 - 1, or None")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None for no limit")
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        limit = self.max_tokens
        check("min_tokens", limit is None or self.min_tokens <= limit, f"at most max_tokens, which is {limit}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(name, value is None or -1 <= value <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, -1 for all, or None")
        check("stop", all(isinstance(s, str) and s for s in self.stop_strings), "one or more non-empty strings")
        check("stop", self.detokenize or not self.stop_strings, "empty when detokenize is False")

    def _check_types(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            self._check(name, _is_integer(getattr(self, name)), "an integer")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or _is_integer(value), "an integer, or None")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            self._check(name, hasattr(value, "__float__") and not isinstance(value, (bool, str)), "a number")
        stop = self.stop
        self._check("stop", stop is None or isinstance(stop, (str, Sequence)), "one or more non-empty strings")
        ids = self.stop_token_ids
        listed = ids is None or (isinstance(ids, Collection) and all(_is_integer(token_id) for token_id in ids))
        self._check("stop_token_ids", listed, "a list of token ids")

    def _check(self, name: str, holds: bool, requirement: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {requirement}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_integer(value: object) -> bool:
    """Also numpy's; True and False are none."""
    return hasattr(value, "__index__") and not isinstance(value, bool)
