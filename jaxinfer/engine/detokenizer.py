"""Token ids to text deltas, one token at a time: whole characters only, stop strings found and cut.

Decoding ids one by one is not decoding them together: a character may be spread over tokens, and SentencePiece drops
the space that leads a text. So each new token is decoded behind a short window of tokens whose text is known, and what
the window's text gained is the token's text. The window never grows with the output: a token costs O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxinfer.sampling_params import SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoding puts for bytes that are no UTF-8: at the end of a text, perhaps a character still incomplete."""
PENDING_TOKENS = 3
"""Tokens that can pass before a character is complete, being one byte each of a character of at most four."""
WINDOW_TOKENS = 16
"""Tokens, so at least bytes, kept when a window has to be cut: 9 may be held as 3 broken characters, and the 3 after
the cut may decode differently for want of what stood before."""


class TextDecoder(Protocol):
    """The two questions that a detokenizer asks a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def renders(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether the id puts any text or bytes into `decode`: not a skipped special token, nor an unknown id."""


class Detokenizer:
    """The text of one sequence, told as it grows.

    Texts returned by `push`, `extend` and `finish`, joined, are `text`: what decoding prompt and output together adds
    to the prompt's own text, up to the first stop string. A stop string is found wherever tokens or calls split it;
    of several, the one completed first counts, and of those completed by the same character, the longest. It may only
    be completed after the first `min_tokens` tokens. `text` never shows what may turn out to begin a stop string.

    With `tokenizer` None or `params.detokenize` False every text is "".
    """

    def __init__(self, tokenizer: TextDecoder | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._pieces = _PieceDecoder(tokenizer, prompt_token_ids, params.skip_special_tokens) if tokenizer else None
        if not params.detokenize:
            self._pieces = None
        self._matchers = [_StopMatcher(stop) for stop in params.stop_strings]
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._released: list[str] = []
        self._held = ""
        self.num_tokens = 0
        """Tokens taken in; those that come after a stop string are not."""
        self.stop_reason: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """All text released so far."""
        self._released = ["".join(self._released)]
        return self._released[0]

    def push(self, token_id: int) -> str:
        """The text that one more token releases. After a stop string (see `stop_reason`): "", the token is ignored."""
        if self.stop_reason is not None:
            return ""
        self.num_tokens += 1
        if self._pieces is None:
            return ""
        return self._release(self._pieces.push(token_id))

    def extend(self, token_ids: Sequence[int]) -> str:
        """The text that several tokens release, exactly as if pushed one by one."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The text that was held back; an incomplete character ends as U+FFFD. Push no more after it."""
        if self._pieces is None or self.stop_reason is not None:
            return ""
        rest, self._held = self._held + self._pieces.finish(), ""
        self._released.append(rest)
        return rest

    def _release(self, piece: str) -> str:
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            completed = [m.stop for m in self._matchers if m.push(char)]
            if completed and self.num_tokens > self._min_tokens:
                self.stop_reason = max(completed, key=len)
                released, self._held = text[: end if self._include_stop else end - len(self.stop_reason)], ""
                break
        else:
            held = max((m.matched for m in self._matchers), default=0)
            released, self._held = text[: len(text) - held], text[len(text) - held :]
        if released:
            self._released.append(released)
        return released


class _PieceDecoder:
    """The text of each token in its place, incomplete characters held until they are whole."""

    def __init__(self, tokenizer: TextDecoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._context(prompt_token_ids)
        self._told = self._decode(self._window)
        """The window's text as far as it was given out, or belongs to the prompt."""
        self._num_context = len(self._window)
        """Leading tokens of the window that end with a whole character; those behind them are pending."""
        while self._decode(self._window[: self._num_context]).endswith(REPLACEMENT):
            self._num_context -= 1  # the prompt ends within a character

    def push(self, token_id: int) -> str:
        if not self._tokenizer.renders(token_id, self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        start, whole = self._start(text), text.rstrip(REPLACEMENT)
        if whole == text:
            piece = text[start:]
            if piece or not self._num_context:
                self._window = self._window[self._num_context :]
                self._told = self._decode(self._window)
                self._num_context = len(self._window)
            else:  # a token without text is no context: the one before it still guards the leading space
                del self._window[self._num_context :]
            return piece
        if len(self._window) - self._num_context > PENDING_TOKENS:
            # Not all of the broken end is one incomplete character, only its last bytes can be.
            whole = text[: max(len(whole), len(text) - PENDING_TOKENS)]
        if len(whole) <= start:
            return ""
        self._told = whole
        if len(self._window) >= 2 * WINDOW_TOKENS:
            self._cut(len(text) - len(whole))
        return whole[start:]

    def finish(self) -> str:
        text = self._decode(self._window)
        piece, self._told = text[self._start(text) :], text
        return piece

    def _start(self, text: str) -> int:
        """Where the window's untold text starts: an incomplete character that ends the prompt may become whole."""
        told = self._told
        return len(told) if text.startswith(told) else len(told.rstrip(REPLACEMENT))

    def _cut(self, num_held: int) -> None:
        """Shorten a window that never ends with a whole character, as when each token ends one and begins another."""
        self._window = self._window[-WINDOW_TOKENS:]
        text = self._decode(self._window)
        self._told = text[: len(text) - num_held]
        self._num_context = WINDOW_TOKENS - PENDING_TOKENS - 1

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The fewest last tokens of the prompt that have text and do not start within a character."""
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if not self._tokenizer.renders(token_id, self._skip_special_tokens):
                continue
            context.insert(0, token_id)
            text = self._decode(context)
            if (text and not text.startswith(REPLACEMENT)) or len(context) == WINDOW_TOKENS:
                break
        return context

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


class _StopMatcher:
    """How much of `stop` the text ends with, told one character at a time (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest proper prefix of `stop` that the text ends with."""
        self._borders = [0] * len(stop)
        for i in range(1, len(stop)):
            self._borders[i] = self._next(self._borders[i - 1], stop[i])

    def push(self, char: str) -> bool:
        """Take one character; True if it completes the stop string."""
        self.matched = self._next(self.matched, char)
        if complete := self.matched == len(self.stop):
            self.matched = self._borders[-1]
        return complete

    def _next(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == char)
