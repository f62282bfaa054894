"""The jitted step: one batch through model and sampler, the cache updated in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer import compilation, memory
from jaxinfer.config import ModelConfig
from jaxinfer.engine import sampler
from jaxinfer.engine.batch import NO_TARGET, UNREAD, Batch, BatchShape, packed_size, sampling_inputs, unpack
from jaxinfer.engine.chunks import chunks_apart
from jaxinfer.engine.sampler import RowLogprobs
from jaxinfer.models import Decoder
from jaxinfer.models.attention import AttentionInputs
from jaxinfer.models.decoder import Kept, LayerInputs
from jaxinfer.models.recurrent import recurrent_inputs
from jaxinfer.models.rope import cos_sin, growth
from jaxinfer.parameters import Tree
from meshes import sharding
from pallas_kernels import paged_decode, paged_prefill
from pallas_kernels.kv_pages import KVPages, abstract_pages
from pallas_kernels.target import Target


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids", "row_logprobs", "logprobs"], meta_fields=[])
@dataclass(frozen=True)
class StepOutput:
    """What a step computed, still on the device."""

    ids: jax.Array
    """[sequences] i32: the sampled ids."""
    row_logprobs: RowLogprobs | None
    """Per row; zeros if the batch asked for none, None if none of its shape can: not even zeros are written then."""
    logprobs: jax.Array | None
    """[rows, vocab] f32 of a scored batch."""


@dataclass(frozen=True)
class State:
    """What stays on the device between steps, and is donated to each."""

    cache: list[Kept]
    """What each layer keeps: a pool of pages, or a state per slot."""
    last_ids: jax.Array
    """[max_num_seqs] i32: each running sequence's newest id, through which it reaches the next step."""


jax.tree_util.register_dataclass(State, data_fields=["cache", "last_ids"], meta_fields=[])


type AbstractState = Any
"""A State of ShapeDtypeStructs."""


class StepRunner:
    """Executables by batch shape, and the state they pass on. `run` dispatches and does not wait."""

    def __init__(self, config: ModelConfig, weights: Tree, mesh: Mesh, target: Target | None = None):
        """config: as laid out for the mesh; weights: a nested dict of arrays, or of shapes if only to compile; target:
        by default the mesh's.
        """
        self._weights = weights
        self._executables: dict[BatchShape, Any] = {}
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
        graph, _ = nnx.split(Decoder(config, abstract, mesh))
        self._step = functools.partial(
            step, graph=graph, config=config, target=target or target_of(mesh), shards=mesh.shape["tensor"]
        )
        self._mesh, self._replicated = mesh, sharding(mesh)
        self.state: State | None = None
        self._holes: list[jax.Array] = []

    def lower(self, shape: BatchShape, state: AbstractState) -> jax.stages.Lowered:
        """The step of one batch shape, traced for a state of these shapes and shardings."""
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32, sharding=self._replicated)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        fn = jax.jit(
            functools.partial(self._step, shape=shape),
            donate_argnums=(1,),
            out_shardings=(self._replicated, shardings),
        )
        return fn.lower(self._weights, state, packed)

    def compile(self, shapes: Sequence[BatchShape], progress: bool = False) -> None:
        """Compile these shapes ahead of their use, several at a time."""
        assert self.state is not None
        self._holes = self._holes or memory.keep_temporaries_in_place(self._mesh)
        missing = [shape for shape in shapes if shape not in self._executables]
        state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self.state)
        compiled = compilation.compile_all([functools.partial(self.lower, shape, state) for shape in missing], progress)
        self._executables.update(zip(missing, compiled, strict=True))

    def run(self, batch: Batch) -> StepOutput:
        """Dispatch one step; compiles first if its shape is new."""
        if batch.shape not in self._executables:
            self.compile([batch.shape])
        packed = jax.device_put(batch.pack(), self._replicated)
        output, self.state = self._executables[batch.shape](self._weights, self.state, packed)
        return output


def target_of(mesh: Mesh) -> Target:
    """What the steps of a mesh are compiled for."""
    return Target.of(mesh.devices.flat[0])


def step(
    weights: Tree,
    state: State,
    packed: jax.Array,
    *,
    shape: BatchShape,
    graph: nnx.GraphDef,
    config: ModelConfig,
    target: Target,
    shards: int,
) -> tuple[StepOutput, State]:
    """Embed, layers, head on the rows that need it, sample. Pure: state in, state out."""
    arrays = unpack(packed, shape)
    decoder = nnx.merge(graph, weights)
    sequence = sequence_of_token(arrays, shape)
    last_ids = state.last_ids.at[arrays["slots"][sequence]].get(mode="clip")
    tokens = jnp.where(arrays["tokens"] == UNREAD, last_ids, arrays["tokens"])
    planner = attention_planner(shape, config, weights["embed"]["weight"].dtype, target, shards)
    inputs = layer_inputs(arrays, shape, sequence, config, state.cache, planner, target)
    hidden, cache = decoder(tokens, arrays["positions"], state.cache, inputs)
    logits = decoder.logits(hidden[arrays["logit_rows"]], target)  # [rows, vocab]

    ids = sampler.sample(logits[arrays["sample_rows"]] if shape.scored else logits, sampling_inputs(arrays, shape))
    kept = jnp.where(arrays["samples"] > 0, arrays["slots"], state.last_ids.shape[0])
    new_last_ids = state.last_ids.at[kept].set(ids, mode="drop")
    row_logprobs, logprobs = report_logprobs(logits, ids, arrays, shape)
    return StepOutput(ids, row_logprobs, logprobs), State(cache, new_last_ids)


def sequence_of_token(arrays: dict[str, jax.Array], shape: BatchShape) -> jax.Array:
    """[tokens] i32: the sequence each token belongs to; padding tokens get some sequence."""
    rows = jnp.arange(shape.tokens)
    if shape.decode:
        return rows
    found = jnp.searchsorted(arrays["query_start"], rows, side="right", method="compare_all") - 1  # no loop
    return jnp.minimum(found, shape.sequences - 1)


type Planner = Callable[[KVPages, int | None, jax.Array, jax.Array, jax.Array], Any]
"""Pages of a cache group, its window, and block tables, query_start and lengths of its sequences → what the attention
kernel divides its work by; None where XLA attends."""


def attention_planner(
    shape: BatchShape,
    config: ModelConfig,
    dtype: jnp.dtype,
    target: Target,
    shards: int,
) -> Planner:
    """dtype: of the activations; shards: devices that share the kv heads."""
    options: dict[str, Any] = {"q_dtype": dtype, "q_per_kv": config.q_per_kv, "target": target}
    kv_heads = config.num_kv_heads // shards

    def plan(pages: KVPages, window: int | None, tables: jax.Array, query_start: jax.Array, lengths: jax.Array) -> Any:
        shape_of = (pages.num_pages, kv_heads, pages.page_size, pages.head_dim, pages.dtype)
        mine = abstract_pages(*shape_of, shared=pages.shared)
        if shape.decode:
            return paged_decode.make_plan(lengths, tables, mine, window=window, **options)
        q = jax.ShapeDtypeStruct((shape.tokens, kv_heads, config.q_per_kv, config.head_dim), dtype)
        if paged_prefill.obstacle(q, mine, target):
            return None
        return paged_prefill.make_plan(query_start, lengths, tokens=shape.tokens, q_per_kv=config.q_per_kv)

    return plan


def layer_inputs(
    arrays: dict[str, jax.Array],
    shape: BatchShape,
    sequence: jax.Array,
    config: ModelConfig,
    cache: list[Kept],
    planner: Planner,
    target: Target,
) -> list[LayerInputs]:
    """One entry per layer; layers of a group that turn alike share theirs, as do recurrent ones."""
    positions = arrays["positions"]
    ropes = {config.rope_of(layer) for group in config.cache_groups for layer in group.layers}
    turns = {rope: (None, None) if rope is None else cos_sin(rope, config.head_dim, positions) for rope in ropes}
    query_scale = None if config.query_scaling is None else growth(config.query_scaling, positions)
    padding = jnp.arange(shape.tokens) >= arrays["query_start"][-1]
    places = arrays["places"][sequence] if shape.adapters else None
    layers: dict[int, LayerInputs] = {}
    if config.recurrent_layers:
        recurrent = recurrent_inputs(arrays["slots"], positions, arrays["query_start"], sequence, shape.decode, target)
        layers = dict.fromkeys(config.recurrent_layers, dataclasses.replace(recurrent, places=places))
    for group, tables in zip(config.cache_groups, arrays["block_tables"], strict=True):
        # Computed, not sliced: XLA hands a slice to every kernel where it lies in the packed batch, unaligned, and at
        # another address in every step, which the host would have to write into the CUDA graph layer by layer.
        tables = jnp.maximum(tables, 0)
        pages, chunk = cache[group.layers[0]], group.chunk
        assert isinstance(pages, KVPages)
        seen, query_start, lengths = tables, arrays["query_start"], arrays["lengths"]
        if chunk is not None and chunk % pages.page_size == 0:  # the kernels take no other
            sizes = {"chunk": chunk, "page_size": pages.page_size, "most": 1 if shape.decode else shape.tokens}
            seen, query_start, lengths = chunks_apart(tables, query_start, lengths, **sizes)
            chunk = None
        inputs = AttentionInputs(
            cos=None,
            sin=None,
            query_scale=None,
            page_ids=jnp.where(padding, pages.num_pages, tables[sequence, positions // pages.page_size]),
            offsets=positions % pages.page_size,
            block_tables=seen,
            query_start=query_start,
            lengths=lengths,
            plan=planner(pages, group.window, seen, query_start, lengths) if chunk is None else None,
            decode=shape.decode,
            target=target,
            chunk=chunk,
            places=places,
        )
        for layer in group.layers:
            cos, sin = turns[config.rope_of(layer)]
            scale = query_scale if config.scales_queries(layer) else None
            layers[layer] = dataclasses.replace(inputs, cos=cos, sin=sin, query_scale=scale)
    return [layers[layer] for layer in range(config.num_layers)]


def report_logprobs(
    logits: jax.Array, ids: jax.Array, arrays: dict[str, jax.Array], shape: BatchShape
) -> tuple[RowLogprobs | None, jax.Array | None]:
    """The model's raw log-probabilities, of each row's target and of the most likely ids."""
    if shape.scored:
        rows = jnp.where(arrays["samples"] > 0, arrays["sample_rows"], shape.rows)
        sampled = jnp.zeros(shape.rows, jnp.int32).at[rows].set(ids, mode="drop")
        targets = jnp.where(arrays["targets"] == NO_TARGET, sampled, arrays["targets"])
        logprobs = jax.nn.log_softmax(logits)
        return sampler.row_logprobs(logprobs, targets), logprobs
    wanted = sampling_inputs(arrays, shape).any_logprobs
    if wanted is False:
        return None, None
    row_logprobs = sampler.when(
        wanted,
        lambda: sampler.row_logprobs(jax.nn.log_softmax(logits), ids),
        lambda: sampler.no_logprobs(shape.rows),
    )
    return row_logprobs, None
