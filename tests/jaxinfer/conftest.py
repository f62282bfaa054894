"""Tiny models, made once a session: compiling their steps is what these tests pay for."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM
from tests import tiny
from tests.jaxinfer import successor

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
TINY: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 8,
    "warm_up": False,
    "progress": False,
}
"""Four programs at most: ragged and scored batches of 16 tokens, decode batches of 1 and 4 sequences."""
MOST_MODELS = 24
"""Kept at once: their programs map memory, of which Linux gives a process 65530 pieces."""


class Models:
    """`models(case, **settings)`: the LLM of a tiny checkpoint, TINY settings unless told; mostly the same
    one when asked again, so tests leave it idle."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._llms: dict[tuple, LLM] = {}

    def checkpoint(self, case: str) -> Path:
        folder = self._folder / case
        files = 1 if case in tiny.CASES else 2
        return folder if folder.exists() else tiny.write_checkpoint(case, folder, shards=files)

    def __call__(self, case: str, **settings: Any) -> LLM:
        key = case, *sorted(settings.items())
        if key not in self._llms:
            if len(self._llms) == MOST_MODELS:
                self._llms.clear()
                gc.collect()
            self._llms[key] = LLM(str(self.checkpoint(case)), **{**TINY, **settings})
        llm = self._llms[key]
        assert_idle(llm)
        return llm


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def golden():
    """`golden(case)`: what transformers computed, as scripts/make_goldens.py wrote it."""

    def load(case: str) -> dict[str, np.ndarray]:
        with np.load(GOLDENS / f"{case}.npz") as file:
            return dict(file)

    return load


@pytest.fixture(scope="session")
def successor_llm(tmp_path_factory):
    folder = successor.write(tmp_path_factory.mktemp("successor"))
    return LLM(str(folder), **{**TINY, "skip_tokenizer_init": False, "max_model_len": 64})


@pytest.fixture(name="successor")
def idle_successor(successor_llm):
    """The LLM of tests/jaxinfer/successor.py: it says what it is told. Idle before a test and after it."""
    assert_idle(successor_llm)
    yield successor_llm
    assert_idle(successor_llm)


def assert_idle(llm: LLM) -> None:
    """Nothing runs, nothing waits, every page and slot is free."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_unfinished
    assert not scheduler.has_unfinished
    assert [pool.num_free for pool in scheduler.pools] == [pool.num_pages for pool in scheduler.pools]
