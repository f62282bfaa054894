"""A tiny model through the whole engine twice: on kernels in Mosaic's interpreter, and on XLA. Run as a module.

    JAX_CPU_ENABLE_ASYNC_DISPATCH=0 python -m tests.jaxinfer.interpreted_engine CACHE_DTYPE QUANTIZATION

Prints a JSON object: the ids of both, the largest difference of a log-probability, which kernels ran.
A process of its own: interpreted kernels call back into JAX, and wait for ever where steps run in the background.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.engine import step
from jaxinfer.models import attention, layers, norms
from pallas_kernels import choice
from pallas_kernels.target import HOPPER, Target
from tests.pallas_kernels.interpreter import interpreter

MODEL = ModelConfig(
    family="qwen3", vocab_size=128, hidden_size=1024, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64,
    mlp_size=128, max_position=512, rope=RopeConfig(), qk_norm=True,
)  # fmt: skip
PROMPTS = [{"prompt_token_ids": np.random.default_rng(n).integers(0, 128, n).tolist()} for n in (18, 5)]
FEW_CORES = Target("gpu", HOPPER, 4, untimed=True)
"""Hopper, with all kernels there are; a kernel that fills the GPU has fewer blocks to interpret."""
OPERATIONS = (
    "cache_append",
    "paged_decode",
    "paged_prefill",
    "rms_norm",
    "add_rms_norm",
    "gate_up",
    "down",
    "quant_matmul",
    "norm_and_quantize_rows",
    "norm_projection",
    "norm_gate_up",
)


@contextlib.contextmanager
def interpreted() -> Iterator[set[str]]:
    """The layers' operations run in the interpreter where their kernels run; the names of those that did."""
    ran: set[str] = set()

    def call(operation: Any, *args: Any, **options: Any) -> Any:
        with choice.recorded() as made:
            out = operation(*args, **options, interpret=interpret)
        ran.update(decision.op for decision in made if decision.implementation == "mosaic")
        return out

    with contextlib.ExitStack() as stack:
        interpret = stack.enter_context(interpreter())
        for module in (attention, layers, norms):
            for name in OPERATIONS:
                if operation := getattr(module, name, None):
                    stack.enter_context(mock.patch.object(module, name, functools.partial(call, operation)))
        yield ran


def generate(target: Target, cache_dtype: str, quantization: str | None) -> list[Any]:
    with mock.patch.object(step, "target_of", return_value=target):
        llm = LLM(
            MODEL, dtype="bfloat16", kv_cache_dtype=cache_dtype, quantization=quantization, max_model_len=128,
            max_num_seqs=2, max_num_batched_tokens=16, page_size=16 if cache_dtype == "auto" else 64, num_pages=8,
            warm_up=False, progress=False,
        )  # fmt: skip
        return llm.generate(PROMPTS, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1))


def main(cache_dtype: str, quantization: str | None) -> None:
    with interpreted() as ran:
        kernels = generate(FEW_CORES, cache_dtype, quantization)
    xla = generate(Target("gpu"), cache_dtype, quantization)
    pairs = [(one.outputs[0], other.outputs[0]) for one, other in zip(kernels, xla, strict=True)]
    difference = max(
        abs(entry[i].logprob - wanted[i].logprob)
        for one, other in pairs
        for i, entry, wanted in zip(one.token_ids, one.logprobs, other.logprobs, strict=True)
        if i in wanted
    )
    ids = [[output.token_ids for output in pair] for pair in pairs]
    print(json.dumps({"ids": ids, "difference": difference, "kernels": sorted(ran)}))


if __name__ == "__main__":
    main(sys.argv[1], None if sys.argv[2] == "none" else sys.argv[2])
