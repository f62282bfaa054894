"""What 8 and 4 bits cost in accuracy: the next-token distributions of a text, quantized against not.

    python scripts/accuracy.py --model PATH [--tokens 2000] [--row "kv int8"] [--json]

The text is the beginning of the language reference's chapters on execution, imports and types, which every Python ships
for its `help()` (`pydoc_data.topics`): nothing is fetched, and versions of Python differ by a few words. It is one
prompt, which the engine cuts into chunks: every token reads keys and values from the cache, as they are stored.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.calibration import Ready, calibrate
from jaxinfer.config import Quantization
from jaxinfer.tokenizer import Tokenizer

CHAPTERS = ("execmodel", "import", "types")
CALIBRATION = ("compound", "formatstrings")
"""Chapters that calibrate: none of those that are predicted, but of the same language and style."""
CALIBRATION_TOKENS = 4096
ROWS_AT_ONCE = 128
"""Distributions compared together: a few dozen megabytes of float64."""


@contextmanager
def calibrated(model: str) -> Iterator[str]:
    """The model as `python -m convert --quantization int4 --calibrate` makes it, for as long as it is measured."""
    checkpoint = convert.open_checkpoint(model)
    with tempfile.TemporaryDirectory() as folder:
        ready = Ready(Path(folder))
        quantization = Quantization("int4")
        ids = Tokenizer.load(model).encode(text(CALIBRATION))[:CALIBRATION_TOKENS]
        calibrate(checkpoint, ids, quantization, ready)
        made = convert.save_native(checkpoint, Path(folder) / "made", quantization=quantization, ready=ready)
        yield str(made)


def text(chapters: Sequence[str]) -> str:
    """Of the language reference."""
    return "\n\n".join(topics[chapter] for chapter in chapters)


@dataclass(frozen=True)
class Variant:
    """A way to store weights and cache, and what it may cost."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of `LLM`."""
    made: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    """From the model to the one that is measured."""
    max_divergence: float | None = None
    """Most KL(unquantized, this) of the next token's distribution, in nats, on average; None: not a target."""
    max_change: float | None = None
    """Most relative change of the perplexity, either way; None: not a target."""


VARIANTS: dict[str, Variant] = {
    "kv int8": Variant({"kv_cache_dtype": "int8"}, max_divergence=1e-3, max_change=0.005),
    "kv fp8": Variant({"kv_cache_dtype": "fp8"}, max_divergence=3e-3, max_change=0.005),
    "weights int8": Variant({"quantization": "int8"}, max_change=0.005),
    "weights fp8": Variant({"quantization": "fp8"}),
    "weights and activations int8": Variant({"quantization": "int8", "quantize_activations": True}),
    "weights and activations fp8": Variant({"quantization": "fp8", "quantize_activations": True}),
    "weights int4": Variant({"quantization": "int4"}),
    "weights int4 calibrated": Variant(made=calibrated),
}


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    divergence: float
    """Mean KL divergence from the unquantized model, in nats."""
    perplexity: float
    change: float
    """Of the perplexity, relative."""
    max_divergence: float | None = None
    max_change: float | None = None

    @property
    def passed(self) -> bool | None:
        """Whether all targets are met; None without any."""
        met = [
            value <= limit
            for value, limit in ((self.divergence, self.max_divergence), (abs(self.change), self.max_change))
            if limit is not None
        ]
        return all(met) if met else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint that is not quantized")
    parser.add_argument("--tokens", type=int, default=2000, help="next tokens predicted")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--row", action="append", choices=sorted(VARIANTS), help="may be repeated; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    args = parser.parse_args()
    prompt = first_tokens(args.model, args.tokens + 1)
    names = args.row or list(VARIANTS)
    for result in compare(args.model, prompt, {name: VARIANTS[name] for name in names}, dtype=args.dtype):
        print(
            json.dumps(dataclasses.asdict(result) | {"passed": result.passed}) if args.json else line(result),
            flush=True,
        )


def first_tokens(model: str, count: int) -> list[int]:
    """The text's first tokens. Raises ValueError if it has fewer."""
    ids = Tokenizer.load(model).encode(text(CHAPTERS))
    if len(ids) < count:
        raise ValueError(f"the text has {len(ids)} tokens, and {count} are asked for; lower --tokens")
    return ids[:count]


def compare(model: Any, ids: Sequence[int], variants: dict[str, Variant], **settings: Any) -> Iterator[Result]:
    """The unquantized model's row, then one for each variant. settings: of every `LLM`."""
    want = next_logprobs(model, ids, **settings)
    plain = perplexity(want, ids)
    yield Result("unquantized", 0.0, plain, 0.0)
    for name, variant in variants.items():
        with variant.made(model) as made:
            got = next_logprobs(made, ids, **settings, **variant.settings)
        value = perplexity(got, ids)
        limits = variant.max_divergence, variant.max_change
        yield Result(name, divergence(want, got), value, value / plain - 1, *limits)


def next_logprobs(model: Any, ids: Sequence[int], **settings: Any) -> np.ndarray:
    """[tokens - 1, vocab] f32: after every token but the last, the log-probabilities of the next."""
    defaults = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "max_model_len": len(ids) + 1}
    llm = LLM(model, warm_up=False, progress=False, skip_tokenizer_init=True, **{**defaults, **settings})
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    [output] = llm.generate({"prompt_token_ids": list(ids)}, params)
    assert isinstance(output.prompt_logprobs, np.ndarray)
    rows = output.prompt_logprobs[:-1]
    del llm, output
    gc.collect()  # the next model takes this one's memory
    return rows


def divergence(want: np.ndarray, got: np.ndarray) -> float:
    """Mean KL(want, got) over the rows, in nats. Both: [rows, vocab] log-probabilities."""
    total = 0.0
    for start in range(0, len(want), ROWS_AT_ONCE):
        p, q = (rows[start : start + ROWS_AT_ONCE].astype(np.float64) for rows in (want, got))
        total += float((np.exp(p) * (p - q)).sum())
    return total / len(want)


def perplexity(logprobs: np.ndarray, ids: Sequence[int]) -> float:
    """exp of the mean surprise at each next token. logprobs: [len(ids) - 1, vocab]."""
    chosen = np.take_along_axis(logprobs, np.asarray(ids[1:])[:, None], axis=1).astype(np.float64)
    return float(np.exp(-chosen.mean()))


def line(result: Result) -> str:
    r = result
    limits = [f"KL <= {r.max_divergence:g}"] if r.max_divergence is not None else []
    limits += [f"perplexity within {r.max_change:.1%}"] if r.max_change is not None else []
    verdict = {True: "pass", False: "MISS", None: ""}[r.passed]
    return (
        f"{r.name:<28} KL {r.divergence:.2e}   perplexity {r.perplexity:.4f} ({r.change:+.3%})"
        f"   {', '.join(limits):<34} {verdict}"
    ).rstrip()


if __name__ == "__main__":
    main()
