"""A step's sequences as arrays: numpy on the host, padded to one of a few shapes, one int32 vector on its way over.

Buckets. A decode batch (one token per sequence) has 1, 4, 16, 32 sequences or a larger power of two, up to
max_num_seqs. A ragged batch (at least one sequence brings several tokens) has 16, 64, 256 tokens or a larger power of
two, up to max_num_batched_tokens, and room for as many sequences as could share them. A scored batch is a ragged one
that also returns every row's logits. Every shape is a program to compile at start-up: few where padding is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxinfer.config import EngineConfig
from jaxinfer.engine.request import NO_PLACE
from jaxinfer.engine.sampler import SamplingInputs
from jaxinfer.engine.scheduler import Scheduled
from jaxinfer.sampling_params import MAX_SUPPRESSED, SamplingParams

SEQUENCE_BUCKETS = (1, 4, 16, 32)
"""Sequences of the smallest decode batches; above, powers of two."""
TOKEN_BUCKETS = (16, 64, 256)
"""Tokens of the smallest ragged batches; above, powers of two."""
WIDTHS = (8, 2)
"""Narrowest block table in pages, and the factor from one to the next, where attention reads tables to their end."""
KERNEL_WIDTHS = (128, 4)
"""The same where the kernel reads only what is there: only the transfer of tables to the device is to be spared."""
UNREAD = -1
"""A token id the host does not know yet: the device takes it from last_ids."""
NO_TARGET = -1
"""A row whose log-probability is that of the id sampled from it."""
NO_ID = np.iinfo(np.int32).max
"""Past any vocabulary: a scatter drops it."""


type Sampling = Literal["greedy", "full", "branch"]
"""What a program samples: the largest logit alone; all that a request can ask for; or whichever the batch needs, a
branch on the device, which is free on CPU and stalls a GPU."""


@dataclass(frozen=True)
class BatchShape:
    """The key of an executable."""

    tokens: int
    sequences: int
    width: int
    """Pages of a block table."""
    groups: int
    decode: bool
    """Every sequence has exactly one token."""
    sampling: Sampling
    scored: bool = False
    """Every token's logits are computed and returned, not only those that are sampled from."""
    adapters: bool = False
    """There are places for adapters, and every sequence has one or none."""

    @property
    def rows(self) -> int:
        """Rows whose logits are computed."""
        return self.tokens if self.scored else self.sequences


@dataclass(frozen=True)
class Batch:
    """A step's input. `arrays` holds what `fields(shape)` lists."""

    shape: BatchShape
    arrays: dict[str, NDArray[np.generic]]

    def pack(self) -> NDArray[np.int32]:
        """All arrays behind each other as int32 bits: one transfer, one broadcast."""
        return np.concatenate([self.arrays[name].reshape(-1).view(np.int32) for name in fields(self.shape)])


def fields(shape: BatchShape) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Name → shape and dtype of every array of a batch, in packing order."""
    i32, u32, f32 = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float32)
    batch = (shape.sequences,)
    return {
        "tokens": ((shape.tokens,), i32),
        "positions": ((shape.tokens,), i32),
        "query_start": ((shape.sequences + 1,), i32),
        "lengths": (batch, i32),
        "slots": (batch, i32),  # the row of last_ids a sequence reads and writes
        "samples": (batch, i32),  # whether its sampled id counts
        "block_tables": ((shape.groups, shape.sequences, shape.width), i32),
        "logit_rows": ((shape.rows,), i32),  # of tokens
        "sample_rows": (batch, i32),  # of logit_rows
        "targets": ((shape.rows,), i32),  # the id whose log-probability a row reports
        "temperature": (batch, f32),
        "top_k": (batch, i32),
        "top_p": (batch, f32),
        "min_p": (batch, f32),
        "seed": (batch, u32),
        "choice": (batch, i32),
        "suppressed": ((shape.sequences, MAX_SUPPRESSED), i32),
        "flags": ((3,), i32),  # any_random, any_filter, any_logprobs
        **({"places": (batch, i32)} if shape.adapters else {}),  # of adapters; −1: none
    }


def packed_size(shape: BatchShape) -> int:
    """Length of a packed batch of this shape."""
    return sum(math.prod(dims) for dims, _ in fields(shape).values())


def unpack(packed: jax.Array, shape: BatchShape) -> dict[str, jax.Array]:
    """The arrays of `Batch.pack` again, on the device."""
    arrays, start = {}, 0
    for name, (dims, dtype) in fields(shape).items():
        size = math.prod(dims)
        piece = jax.lax.slice(packed, (start,), (start + size,)).reshape(dims)
        arrays[name] = piece if dtype == np.int32 else jax.lax.bitcast_convert_type(piece, jnp.dtype(dtype))
        start += size
    return arrays


def sampling_inputs(arrays: dict[str, jax.Array], shape: BatchShape) -> SamplingInputs:
    """The sampler's part of a batch. The new token of a sequence stands at its length."""
    rows = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "suppressed")
    flags: Sequence[jax.Array | bool] = [flag > 0 for flag in arrays["flags"]]
    if shape.sampling != "branch":
        flags = [shape.sampling == "full"] * len(flags)
    random, filtered, logprobs = flags
    return SamplingInputs(
        **{name: arrays[name] for name in rows},
        position=arrays["lengths"],
        any_random=random,
        any_filter=filtered,
        any_logprobs=logprobs,
    )


def data_dependent(platform: str) -> bool:
    """Whether steps may loop and branch on what a batch holds: to the longest sequence only, sampling only if asked.

    It costs nothing on CPU. A GPU has to wait for the host in every turn and at every branch.
    """
    return platform == "cpu"


class BatchBuilder:
    """Turns scheduled sequences into arrays, and knows all shapes that can come."""

    def __init__(
        self,
        engine: EngineConfig,
        groups: int,
        data_dependent: bool,
        widths: tuple[int, int] = WIDTHS,
        adapters: bool = False,
    ):
        """data_dependent: whether programs may loop and branch on what a batch holds. If not, there are more of them:
        block tables come in several `widths`, and greedy batches have programs of their own. adapters: whether the
        model has places for them."""
        self._adapters = adapters
        self._engine = engine
        self._groups = groups
        self._data_dependent = data_dependent
        self._width = -(-engine.max_model_len // engine.cache.page_size)
        self._widths = [self._width] if data_dependent else _powers(widths[0], self._width, widths[1])
        self.max_scored_tokens = max(min(256, engine.max_num_batched_tokens), engine.max_num_seqs)

    def shapes(self) -> list[BatchShape]:
        """Every shape `build` can ask for, the largest ragged one first."""
        sequences = _buckets(SEQUENCE_BUCKETS, self._engine.max_num_seqs)
        tokens = _buckets(TOKEN_BUCKETS, self._engine.max_num_batched_tokens)
        scored = _buckets(TOKEN_BUCKETS, self.max_scored_tokens)
        kinds: list[Sampling] = ["branch"] if self._data_dependent else ["greedy", "full"]
        shapes = [self._ragged(count, kind) for kind in kinds for count in reversed(tokens)]
        shapes += [self._ragged(count, kinds[-1], scored=True) for count in scored]
        shapes += [self._decode(count, width, kind) for kind in kinds for width in self._widths for count in sequences]
        return list(dict.fromkeys(shapes))

    def shape(self, scheduled: Sequence[Scheduled]) -> BatchShape:
        """The smallest shape that holds these sequences."""
        scored = any(part.request.wants_every_row() for part in scheduled)
        tokens = sum(part.count for part in scheduled)
        kind = self._sampling(scheduled, scored)
        if scored or tokens > len(scheduled):
            limit = self.max_scored_tokens if scored else self._engine.max_num_batched_tokens
            return self._ragged(_smallest(_buckets(TOKEN_BUCKETS, limit), tokens), kind, scored)
        pages = max(-(-(part.start + part.count) // self._engine.cache.page_size) for part in scheduled)
        width = _smallest(self._widths, pages)
        sequences = _smallest(_buckets(SEQUENCE_BUCKETS, self._engine.max_num_seqs), len(scheduled))
        return self._decode(sequences, width, kind)

    def build(self, scheduled: Sequence[Scheduled]) -> Batch:
        """The arrays of a step. Padding tokens and sequences come last; they write nothing and sample nothing."""
        shape = self.shape(scheduled)
        arrays = {name: np.zeros(dims, dtype) for name, (dims, dtype) in fields(shape).items()}
        arrays["slots"][:] = self._engine.max_num_seqs
        arrays["top_p"][:] = 1.0
        arrays["suppressed"][:] = NO_ID
        arrays["targets"][:] = NO_TARGET
        if shape.scored:
            arrays["logit_rows"][:] = np.arange(shape.tokens)
        else:
            arrays["sample_rows"][:] = np.arange(shape.sequences)
        if shape.adapters:
            arrays["places"][:] = NO_PLACE
            arrays["places"][: len(scheduled)] = [part.request.place for part in scheduled]
        row = 0
        for number, part in enumerate(scheduled):
            self._fill_tokens(arrays, number, row, part)
            self._fill_sampling(arrays, number, part)
            if shape.scored:
                targets = part.request.prompt_token_ids[part.start + 1 : part.start + part.count + 1]
                arrays["targets"][row : row + len(targets)] = targets
            row += part.count
            arrays["sample_rows" if shape.scored else "logit_rows"][number] = row - 1
        arrays["query_start"][len(scheduled) + 1 :] = row
        return Batch(shape, arrays)

    def _fill_tokens(self, arrays: dict[str, NDArray], number: int, row: int, part: Scheduled) -> None:
        request, rows, stop = part.request, slice(row, row + part.count), part.start + part.count
        ids = [request.token_id(position) for position in range(part.start, stop)]
        arrays["tokens"][rows] = [UNREAD if token_id is None else token_id for token_id in ids]
        arrays["positions"][rows] = np.arange(part.start, stop)
        arrays["query_start"][number + 1] = row + part.count
        arrays["lengths"][number] = stop
        arrays["slots"][number] = request.slot
        arrays["samples"][number] = part.samples
        for group, pages in enumerate(request.pages):
            # Released pages (−1) are out of every window: any page will do in their place.
            arrays["block_tables"][group, number, : len(pages)] = np.maximum(np.asarray(pages, np.int32), 0)

    def _fill_sampling(self, arrays: dict[str, NDArray], number: int, part: Scheduled) -> None:
        request, params = part.request, part.request.params
        arrays["temperature"][number] = min(params.temperature, float(np.finfo(np.float32).max))
        arrays["top_k"][number] = min(params.top_k, NO_ID)
        arrays["top_p"][number] = params.top_p
        arrays["min_p"][number] = params.min_p
        arrays["seed"][number] = request.seed
        arrays["choice"][number] = request.index
        if part.samples and part.start + part.count - len(request.prompt_token_ids) < params.min_tokens:
            held_back = sorted(request.stopping_ids)
            arrays["suppressed"][number, : len(held_back)] = held_back
        arrays["flags"] |= np.asarray(_flags(params), np.int32)

    def _sampling(self, scheduled: Sequence[Scheduled], scored: bool) -> Sampling:
        if self._data_dependent:
            return "branch"
        return "full" if scored or any(any(_flags(part.request.params)) for part in scheduled) else "greedy"

    def _decode(self, sequences: int, width: int, sampling: Sampling) -> BatchShape:
        return BatchShape(sequences, sequences, width, self._groups, True, sampling, adapters=self._adapters)

    def _ragged(self, tokens: int, sampling: Sampling, scored: bool = False) -> BatchShape:
        sequences = min(tokens, self._engine.max_num_seqs)
        return BatchShape(tokens, sequences, self._width, self._groups, False, sampling, scored, self._adapters)


def _flags(params: SamplingParams) -> tuple[bool, bool, bool]:
    """Whether a request samples at random, filters, and wants log-probabilities."""
    filters = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
    return params.temperature > 0, filters, params.logprobs is not None or params.prompt_logprobs is not None


def _powers(smallest: int, largest: int, factor: int = 2) -> list[int]:
    """smallest, `factor` times that, … and `largest` itself as the last."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return [*sizes, largest]


def _buckets(first: tuple[int, ...], largest: int) -> list[int]:
    """The `first` sizes, then powers of two, up to `largest`."""
    return sorted({min(size, largest) for size in (*first, *_powers(first[-1], largest))})


def _smallest(sizes: Sequence[int], count: int) -> int:
    """The smallest size that holds `count`."""
    return min(size for size in sizes if size >= count)
