"""What a chat may hold, and how it comes through a model's template without losing anything unsaid."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

type Message = Mapping[str, Any]
"""One turn of a chat: `role`, `content`, and whatever else the model's template reads."""


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError for what is no chat, and for content that is not text."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(
            f"a chat is a list of messages, not {type(messages).__name__}; write [{{'role': 'user', 'content': '…'}}]"
        )
    if not messages:
        raise ValueError("the chat has no messages; give at least one, such as {'role': 'user', 'content': '…'}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {i} is {type(message).__name__}; it must be a dict such as {{'role': 'user', 'content': '…'}}"
            )
        if missing := [key for key in ("role", "content") if key not in message]:
            raise ValueError(f"message {i} has no {' and no '.join(missing)}; it has {sorted(message)}")
        if not isinstance(message["role"], str):
            raise ValueError(f"message {i} has role {message['role']!r}; it must be a string such as 'user'")
        content = message["content"]
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"message {i} has content of type {type(content).__name__}; it must be a string, "
                "a list of content parts, or None where the message holds tool calls"
            )
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"message {i} has the part {part!r:.80}; only text is read, as {{'type': 'text', 'text': '…'}}"
                )


def rendered(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> str:
    """The text that a template makes of messages that `check_messages` accepts.

    Content in parts is given to it as it is, and as the parts' texts with newlines between where it does not take parts
    apart. A warning says which messages the template leaves out. render: applies the template.
    """
    text = _with_parts(messages, render) if any(isinstance(m["content"], list) for m in messages) else None
    if text is None:
        messages = [{**message, "content": _joined(message["content"])} for message in messages]
        text = render(messages)
    for i, message in enumerate(messages):
        # Of what the model itself said, templates leave out the reasoning.
        if message["role"] != "assistant" and not all(part in text for part in _texts(message["content"])):
            logger.warning("the model's chat template leaves out message %d, of the role %s", i, message["role"])
    return text


def _with_parts(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> str | None:
    """None where the template fails on parts, leaves any out, or prints them as Python does."""
    try:
        text = render(messages)
    except Exception as error:  # a template is a program, and may fail in any way
        logger.debug("the chat template takes no parts: %s", error)
        return None
    each = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    taken = all(part["text"].strip() in text and str(dict(part)) not in text for part in each)
    return text if taken else None


def _texts(content: str | list[Any] | None) -> list[str]:
    """Without white space around them, which templates leave out."""
    each = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    return [text.strip() for text in each]


def _joined(content: str | list[Any] | None) -> str | None:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content
