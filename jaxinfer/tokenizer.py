"""Text to token ids and back: what the engine needs of a tokenizer, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.tokenizer import load_tokenizer
from jaxinfer import chat
from jaxinfer.chat import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """A Hugging Face tokenizer, seen by the engine. `raw` is the tokenizer itself.

    Raises ValueError for a tokenizer written in Python: what it makes of an incomplete character is its own.
    """

    def __init__(self, raw: PreTrainedTokenizerBase) -> None:
        if not raw.is_fast:
            raise ValueError(
                f"{type(raw).__name__} is a tokenizer written in Python, which is not supported; use a checkpoint with "
                "a tokenizer.json, or run on token ids with skip_tokenizer_init=True"
            )
        self.raw = raw
        self._backend = raw.backend_tokenizer
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint: a Hugging Face or native folder, or a GGUF file (see `load_tokenizer`)."""
        return cls(load_tokenizer(Path(path)))

    @property
    def bos_token_id(self) -> int | None:
        return self.raw.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.raw.eos_token_id

    @cached_property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included."""
        return len(self.raw)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Ids that decoding skips when asked to: not every added token is special."""
        return frozenset(i for i, token in self.raw.added_tokens_decoder.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds by default, such as BOS.

        Raises ValueError for text with lone surrogates, as come from bytes that are no UTF-8.
        """
        _check_text(text)
        return self.raw.encode(text, verbose=False)

    def encode_start(self, text: str, length: int) -> list[int]:
        """As `encode`, with so much of the text's end left out that at most `length` tokens are left, the special ones
        that surround it among them. Raises ValueError also if these alone are more.
        """
        ids = self.encode(text)
        if len(ids) <= length:
            return ids
        inner = self.raw.encode(text, add_special_tokens=False, verbose=False)
        added = len(ids) - len(inner)
        before = next((n for n in range(added + 1) if ids[n : n + len(inner)] == inner), None)
        if before is None:
            raise ValueError("this tokenizer's special tokens do not surround a text, so it cannot be cut; shorten it")
        if added >= length:
            raise ValueError(f"the {added} special tokens around a text leave no room for it in {length} tokens")
        return [*ids[:before], *inner[: length - added], *ids[before + len(inner) :]]

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a chat, rendered by the model's template and nothing added: the template writes BOS itself.

        Args:
            messages: The turns, each with `role` and `content`.
            add_generation_prompt: End with what makes the model answer.
            **template_kwargs: Passed to the template, such as `tools` or `enable_thinking`; `chat_template` picks one
                of several named templates, or gives another.

        Raises:
            ValueError: The messages are malformed, the tokenizer has no template, or the template refuses them.
        """
        chat.check_messages(messages)
        if self.raw.chat_template is None and template_kwargs.get("chat_template") is None:
            raise ValueError(
                "the tokenizer has no chat template; pass chat_template= (a Jinja template), add a chat_template.jinja "
                "to the checkpoint, or write the prompt as plain text, since base models are not made for chat"
            )

        def render(turns: Sequence[Message]) -> str:
            return self.raw.apply_chat_template(
                list(turns), tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
            )

        try:
            text = chat.rendered(messages, render)
        except Exception as error:  # a template is a program, and may fail in any way
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        _check_text(text)
        return self.raw.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, spaces left as they are; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        # Six times faster than `raw.decode`, which matters for every token of every sequence.
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def renders(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether the id puts any text or bytes into `decode`: not a skipped special token, nor an unknown id."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """One token's text within a text: a leading space is kept, special tokens are written out."""
        text = self._token_texts.get(token_id)
        if text is None:
            # SentencePiece drops the space that leads a text, so look at the second of two.
            alone = self.decode([token_id], skip_special_tokens=False)
            text = self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :]
            self._token_texts[token_id] = text
        return text


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid Unicode text ({error}); was it read from bytes that are no UTF-8?"
        ) from error
