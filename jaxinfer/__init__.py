"""Run large language models in JAX on GPU meshes. Importing this package does not import jax."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, TextDelta
    from jaxinfer.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "TextDelta",
]
__version__ = "0.1.0"

_HOME = {
    "LLM": "jaxinfer.llm",
    "SamplingParams": "jaxinfer.sampling_params",
    "CompletionOutput": "jaxinfer.outputs",
    "EmbeddingOutput": "jaxinfer.outputs",
    "Logprob": "jaxinfer.outputs",
    "RequestOutput": "jaxinfer.outputs",
    "TextDelta": "jaxinfer.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
