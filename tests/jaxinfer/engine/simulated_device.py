"""A device in plain Python that runs the engine's batches and trusts nothing.

Every slot of every page remembers which sequence wrote which id for which position. A step reads what its queries may
see through the block tables, checks that each slot holds just that, and makes the next id out of all ids it read: a
page released too early, shared by two, or missing, shows as a wrong slot or a wrong id.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import numpy as np

from jaxinfer.config import CacheGroup
from jaxinfer.engine.batch import UNREAD, Batch
from jaxinfer.engine.sampler import RowLogprobs
from jaxinfer.sampling_params import MAX_LOGPROBS

VOCAB = 29


def next_id(ids_per_group: list[list[int]], seed: int) -> int:
    """Some id that depends on every visible one and on the request."""
    return zlib.crc32(repr((ids_per_group, seed)).encode()) % VOCAB


def visible(group: CacheGroup, position: int) -> range:
    """Positions that a query sees."""
    seen = range(position + 1)
    if group.window is not None:
        seen = seen[-group.window :]
    return seen if group.chunk is None else range(max(seen[0], position // group.chunk * group.chunk), position + 1)


def generate(
    prompt: list[int], seed: int, groups: tuple[CacheGroup, ...], limit: int, ends: frozenset[int]
) -> list[int]:
    """What one request alone must produce: ids up to an end id, or up to `limit` tokens with the prompt."""
    ids = list(prompt)
    while len(ids) < limit and not (len(ids) > len(prompt) and ids[-1] in ends):
        ids.append(next_id([[ids[p] for p in visible(group, len(ids) - 1)] for group in groups], seed))
    return ids[len(prompt) :]


class SimulatedDevice:
    """What `Engine` calls a runner."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_pages: tuple[int, ...], page_size: int, slots: int):
        self.groups = groups
        self.page_size = page_size
        self.pages = [[[None] * page_size for _ in range(count)] for count in num_pages]
        self.last_ids = [None] * slots
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> SimpleNamespace:
        """Write every token, then read for every token, then sample."""
        a = batch.arrays
        self.batches.append(batch)
        ids = np.full(batch.shape.sequences, -7, np.int32)
        rows = [range(*a["query_start"][b : b + 2]) for b in range(batch.shape.sequences)]
        for b, tokens in enumerate(rows):
            for row in tokens:
                self._write(a, b, row)
        for b, tokens in enumerate(rows):
            for row in tokens:
                seen = [self._read(a, b, int(a["positions"][row]), g) for g in range(len(self.groups))]
            if a["samples"][b]:
                assert a["positions"][row] + 1 == a["lengths"][b]
                ids[b] = self.last_ids[a["slots"][b]] = next_id(seen, int(a["seed"][b]))
        return SimpleNamespace(ids=ids, row_logprobs=self._row_logprobs(batch), logprobs=None)

    def _row_logprobs(self, batch: Batch) -> RowLogprobs:
        """In place of a log-probability, the position of the token whose row it is."""
        positions = batch.arrays["positions"][batch.arrays["logit_rows"]]
        top = np.zeros((batch.shape.rows, MAX_LOGPROBS))
        return RowLogprobs(positions.astype(np.float32), np.ones_like(positions), top, top.astype(np.int32))

    def _write(self, a: dict, b: int, row: int) -> None:
        token, position = int(a["tokens"][row]), int(a["positions"][row])
        token = self.last_ids[a["slots"][b]] if token == UNREAD else token
        for pages, tables in zip(self.pages, a["block_tables"], strict=True):
            page = pages[tables[b, position // self.page_size]]
            page[position % self.page_size] = (int(a["seed"][b]), position, token)

    def _read(self, a: dict, b: int, position: int, group: int) -> list[int]:
        ids = []
        for p in visible(self.groups[group], position):
            page = self.pages[group][a["block_tables"][group, b, p // self.page_size]]
            seed, at, token = page[p % self.page_size] or (None, None, None)
            assert (seed, at) == (a["seed"][b], p), f"group {group} has {seed, at} where {a['seed'][b], p} belongs"
            ids.append(token)
        return ids
