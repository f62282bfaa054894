"""What the tests of generation have in common: prompts, and how outputs are compared."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer import LLM, RequestOutput, SamplingParams

VOCAB = 251


def ids(length: int, seed: int = 0) -> dict[str, list[int]]:
    """A random prompt."""
    return {"prompt_token_ids": np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()}


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Per prompt and choice, the ids."""
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def alone(llm: LLM, prompts: Sequence[dict], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Each prompt in a call of its own."""
    return [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]


def full_forward(llm: LLM, output: RequestOutput, index: int = 0) -> np.ndarray:
    """[prompt + output, vocab]: log-probabilities after every token, prefilled without any decode step."""
    sequence = output.prompt_token_ids + output.outputs[index].token_ids
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    return llm.generate({"prompt_token_ids": sequence[:-1]}, params)[0].prompt_logprobs


def assert_listed(listed: Sequence[dict], rows: np.ndarray, chosen: Sequence[int], atol: float = 1e-4) -> None:
    """`listed` (per position, token id → Logprob) has values and ranks of `rows` [positions, vocab], and `chosen`."""
    assert len(listed) == len(rows) == len(chosen)
    for entries, row, own in zip(listed, rows, chosen, strict=True):
        assert own in entries
        for token_id, entry in entries.items():
            assert abs(entry.logprob - row[token_id]) <= atol
            lowest, highest = (row > row[token_id] + 2 * atol).sum(), (row > row[token_id] - 2 * atol).sum()
            assert 1 + lowest <= entry.rank <= max(highest, 1)


def assert_same_listed(first: Sequence[dict], second: Sequence[dict], atol: float = 1e-4) -> None:
    """The same ids at every position, with the same values."""
    assert [sorted(entries) for entries in first] == [sorted(entries) for entries in second]
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose([one[i].logprob for i in one], [other[i].logprob for i in one], atol=atol)


def poison(llm: LLM) -> None:
    """Fill every page of the idle LLM's cache with NaN; of 8 bits, its scales."""
    runner = llm.engine._runner

    def fill(leaf: jax.Array) -> jax.Array:
        garbage = 77 if leaf.dtype == np.int8 else np.nan
        return jax.device_put(np.full(leaf.shape, garbage, leaf.dtype), leaf.sharding)

    runner.state = type(runner.state)(jax.tree.map(fill, runner.state.cache), runner.state.last_ids)
