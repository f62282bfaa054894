"""What callers of `LLM` pass, told apart and checked: prompts, parameters, names of adapters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from jaxinfer.sampling_params import SamplingParams

type Prompt = str | dict[str, Any]
"""Text, {"prompt": text} or {"prompt_token_ids": ids}."""
type Messages = Sequence[dict[str, Any]]
"""One conversation: [{"role": "user", "content": "Hi"}, …]. Content: text, or parts, [{"type": "text", "text": "Hi"}];
a template that does not take these apart gets their texts with newlines between."""
type Loras = str | Sequence[str | None] | None
"""The name of a loaded adapter for all prompts, or one per prompt; None: the model alone."""


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """Ids count where both are given. Raises ValueError for what is no prompt, and for a dict with anything else."""
    if isinstance(prompt, dict):
        if other := [key for key in prompt if key not in ("prompt", "prompt_token_ids")]:
            raise ValueError(f"a prompt may hold 'prompt' or 'prompt_token_ids', and nothing else; it has {other}")
        if prompt.get("prompt_token_ids") is not None:
            return _token_ids(prompt["prompt_token_ids"])
        prompt = prompt.get("prompt", prompt)
    if not isinstance(prompt, str):
        raise ValueError(f'a prompt is text, {{"prompt": …}} or {{"prompt_token_ids": […]}}; got {prompt!r}')
    return prompt


def _token_ids(ids: Any) -> list[int]:
    """Also numpy's. What has no order, and bytes, are none, though Python can make a list of integers of them."""
    if isinstance(ids, (bytes, bytearray, Mapping, Set)) or not isinstance(ids, Iterable):
        raise ValueError(f"prompt_token_ids must be a list of integers, not {type(ids).__name__}")
    listed = list(ids)
    if odd := [token_id for token_id in listed if isinstance(token_id, bool)]:
        raise ValueError(f"prompt_token_ids must be a list of integers; it holds {odd[0]}")
    try:
        return [operator.index(token_id) for token_id in listed]
    except TypeError as error:
        raise ValueError(f"prompt_token_ids must be a list of integers: {error}") from error


def one_params_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """For `count` prompts. Raises ValueError for anything else, and for another number of them."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = listed(params, "sampling_params")
    if odd := [entry for entry in each if not isinstance(entry, SamplingParams)]:
        raise ValueError(f"sampling_params holds {odd[0]!r}; it must be a SamplingParams, or a list of them")
    if len(each) != count:
        raise ValueError(f"{len(each)} sampling params for {count} prompts; pass one for all, or one per prompt")
    return each


def one_name_each(lora: Loras, count: int) -> list[str | None]:
    """For `count` prompts. Raises ValueError for anything else, and for another number of them."""
    if lora is None or isinstance(lora, str):
        return [lora] * count
    names = listed(lora, "lora")
    if len(names) != count:
        raise ValueError(f"{len(names)} names of adapters for {count} prompts; pass one for all, or one per prompt")
    return names


def listed(values: Any, name: str) -> list[Any]:
    """As a list. Raises ValueError for one text or dict, and for what is none."""
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}, which is no list")
    return list(values)


def check_switches(**switches: Any) -> None:
    """Raises ValueError for what is neither True nor False: "no" would count as True."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be True or False")
