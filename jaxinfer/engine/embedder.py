"""Texts to vectors: many in one ragged batch, all of each at once, so that nothing of them need be kept."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray
from tqdm import tqdm

from convert.sentence import Pooling
from jaxinfer import compilation
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine import cache
from jaxinfer.engine.batch import BatchBuilder, BatchShape
from jaxinfer.engine.step import attention_planner, layer_inputs, sequence_of_token, target_of
from jaxinfer.models import Decoder
from jaxinfer.parameters import Tree
from meshes import sharding
from pallas_kernels.target import Target

POOLINGS: tuple[Pooling, ...] = get_args(Pooling.__value__)
"""The first token's hidden state, the mean of all, the last token's."""
IN_FLIGHT = 2
"""Batches dispatched before the oldest is read: the host prepares the next meanwhile."""


class Embedder:
    """Runs texts through a model and pools their last hidden states. Threads may share it."""

    def __init__(self, config: ModelConfig, weights: Tree, mesh: Mesh, engine: EngineConfig):
        """config: as laid out for the mesh; weights: a nested dict of arrays, or of shapes if only to compile."""
        self._config = config
        self._weights = weights
        self._engine = engine
        self._replicated = sharding(mesh)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
        graph, _ = nnx.split(Decoder(config, abstract, mesh))
        self._embed = functools.partial(
            embed, graph=graph, config=config, mesh=mesh, page_size=engine.cache.page_size, target=target_of(mesh)
        )
        self._executables: dict[BatchShape, Any] = {}
        self._compiling = threading.Lock()
        self.max_length = min(engine.max_model_len, engine.max_num_batched_tokens)
        """Longest text in tokens: none is cut in two."""
        self.shapes = self._shapes()
        """Every shape that `run` can ask for, the largest first."""

    def lower(self, shape: BatchShape) -> jax.stages.Lowered:
        """The program of one batch shape."""
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32, sharding=self._replicated)
        fn = jax.jit(functools.partial(self._embed, shape=shape), out_shardings=self._replicated)
        return fn.lower(self._weights, packed)

    def compile(self, shapes: Sequence[BatchShape], progress: bool = False) -> None:
        """Compile those of these shapes that are not yet, several at a time."""
        with self._compiling:
            missing = [shape for shape in shapes if shape not in self._executables]
            compiled = compilation.compile_all([functools.partial(self.lower, shape) for shape in missing], progress)
            self._executables.update(zip(missing, compiled, strict=True))

    def run(
        self, texts: Sequence[Sequence[int]], pooling: Pooling, normalize: bool, progress: bool
    ) -> NDArray[np.float32]:
        """[texts, hidden] f32. texts: token ids that `check` accepts; normalize: to Euclidean length 1."""
        vectors = np.empty((len(texts), self._config.embed_size), np.float32)
        in_flight: deque[tuple[list[int], jax.Array]] = deque()

        def read() -> None:
            members, pooled = in_flight.popleft()
            vectors[members] = np.asarray(pooled)[: len(members)]
            bar.update(len(members))

        with tqdm(total=len(texts), desc="Embedding", unit="text", disable=not progress) as bar:
            for members in self._batches(texts):
                in_flight.append((members, self._dispatch([texts[i] for i in members], pooling)))
                if len(in_flight) == IN_FLIGHT:
                    read()
            while in_flight:
                read()
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def check(self, ids: Sequence[int], name: str) -> None:
        """Raises ValueError for a text that cannot be embedded; name: what to call it."""
        vocab, most = self._config.vocab_size, self.max_length
        if not ids:
            raise ValueError(f"{name} is empty; give it at least one token")
        if outside := [token_id for token_id in ids if not 0 <= token_id < vocab]:
            raise ValueError(f"{name}: token ids {outside[:5]} are outside the vocabulary of {vocab}")
        if len(ids) > most:
            setting = "max_model_len" if most == self._engine.max_model_len else "max_num_batched_tokens"
            raise ValueError(
                f"{name} has {len(ids)} tokens, and {setting} is {most}: shorten it, embed parts of it, raise "
                f"{setting} as far as the model allows, or pass truncate=True to leave out the end"
            )

    def _batches(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Numbers of texts that go together, in order, as many as tokens and sequences allow."""
        batch: list[int] = []
        tokens = 0
        for number, ids in enumerate(texts):
            full = len(batch) == self._engine.max_num_seqs
            if full or tokens + len(ids) > self._engine.max_num_batched_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(number)
            tokens += len(ids)
        if batch:
            yield batch

    def _dispatch(self, texts: list[Sequence[int]], pooling: Pooling) -> jax.Array:
        """[sequences, hidden] f32 on the device, padding last."""
        lengths = [len(ids) for ids in texts]
        shape = min((shape for shape in self.shapes if shape.tokens >= sum(lengths)), key=lambda shape: shape.tokens)
        if shape not in self._executables:
            self.compile([shape])
        packed = np.zeros(packed_size(shape), np.int32)
        packed[: sum(lengths)] = np.concatenate(texts)
        starts = packed[shape.tokens : -1]
        starts[1 : len(texts) + 1] = np.cumsum(lengths)
        starts[len(texts) + 1 :] = sum(lengths)
        packed[-1] = POOLINGS.index(pooling)
        return self._executables[shape](self._weights, jax.device_put(packed, self._replicated))

    def _shapes(self) -> list[BatchShape]:
        """Those of prompts, with block tables no wider than a text."""
        groups, page_size = len(self._config.cache_groups), self._engine.cache.page_size
        shapes = BatchBuilder(self._engine, groups, data_dependent=True).shapes()
        return [
            dataclasses.replace(shape, width=-(-min(shape.tokens, self.max_length) // page_size))
            for shape in shapes
            if not (shape.decode or shape.scored)
        ]


def packed_size(shape: BatchShape) -> int:
    """Of a batch in one vector: tokens, where each text starts and the last one ends, and which pooling."""
    return shape.tokens + shape.sequences + 2


def embed(
    weights: Tree,
    packed: jax.Array,
    *,
    shape: BatchShape,
    graph: nnx.GraphDef,
    config: ModelConfig,
    mesh: Mesh,
    page_size: int,
    target: Target,
) -> jax.Array:
    """Embed, layers, pool: [sequences, hidden] f32.

    Attention reads keys and values from pages, as when generating, but from such as are written over by the next layer:
    those of a text lie one after another, and texts side by side. So do states, a slot for each text.
    """
    decoder, dtype = nnx.merge(graph, weights), weights["embed"]["weight"].dtype
    tokens, starts = packed[: shape.tokens], packed[shape.tokens : -1]
    lengths = starts[1:] - starts[:-1]
    arrays = {"query_start": starts, "lengths": lengths, "slots": jnp.arange(shape.sequences)}
    sequence = sequence_of_token(arrays, shape)
    rows = jnp.arange(shape.tokens)
    arrays["positions"] = jnp.where(rows < starts[-1], rows - starts[sequence], 0)
    pages = (lengths + page_size - 1) // page_size
    tables = (jnp.cumsum(pages) - pages)[:, None] + jnp.arange(shape.width)
    num_pages = shape.tokens // page_size + shape.sequences
    arrays["block_tables"] = jnp.broadcast_to(
        jnp.minimum(tables, num_pages - 1), (shape.groups, shape.sequences, shape.width)
    )
    abstract = cache.abstract_cache(config, (num_pages,) * shape.groups, page_size, dtype, mesh, shape.sequences)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    planner = attention_planner(shape, config, dtype, target, mesh.shape["tensor"])
    inputs = layer_inputs(arrays, shape, sequence, config, empty, planner, target)
    hidden = decoder.without_cache(tokens, arrays["positions"], empty, inputs)
    return pool(decoder.final(hidden).astype(jnp.float32), starts, packed[-1])


def pool(hidden: jax.Array, starts: jax.Array, pooling: jax.Array) -> jax.Array:
    """hidden: [tokens, embed] f32; starts: [sequences + 1]; pooling: which of POOLINGS, i32.

    What is no number in one text stays in that text.
    """
    first, last = starts[:-1], jnp.maximum(starts[1:] - 1, 0)
    rows = jnp.arange(hidden.shape[0])
    mine = (rows >= first[:, None]) & (rows < starts[1:, None])  # [sequences, tokens]
    broken = ~jnp.isfinite(hidden).all(-1)
    finite = jnp.where(broken[:, None], 0.0, hidden)
    total = jnp.matmul(mine.astype(jnp.float32), finite, precision=jax.lax.Precision.HIGHEST)
    mean = total / jnp.maximum(starts[1:] - first, 1)[:, None]
    mean = jnp.where((mine & broken).any(-1)[:, None], jnp.nan, mean)
    choices = {"cls": hidden[first], "mean": mean, "last": hidden[last]}
    return jax.lax.select_n(pooling, *(choices[name] for name in POOLINGS))
