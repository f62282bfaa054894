"""From a model's name to an engine that is ready: weights on the mesh, the cache's size, compiled steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import convert
from jaxinfer import compilation, memory, parameters, weights
from jaxinfer.config import EngineConfig, ModelConfig, Quantization, at_least_one
from jaxinfer.engine import cache
from jaxinfer.engine.batch import KERNEL_WIDTHS, WIDTHS, BatchBuilder, BatchShape, data_dependent
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.step import AbstractState, State, StepRunner, target_of
from jaxinfer.parameters import Tree, for_tensor_parallel, resolve
from jaxinfer.tokenizer import Tokenizer
from meshes import AXES, build_mesh, sharding
from pallas_kernels import paged_decode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model's weights in the shapes its mesh runs."""

    config: ModelConfig
    """As laid out for the mesh."""
    weights: Tree
    dtype: jnp.dtype
    quantization: Quantization | None
    """Of the projections, by whatever made it."""


def mesh_of(tensor_parallel_size: int, mesh: Mesh | None) -> Mesh:
    """`mesh`, or one of so many devices. Raises ValueError if the two contradict each other, or there are too few."""
    at_least_one("tensor_parallel_size", tensor_parallel_size)
    if mesh is None:
        return build_mesh(tensor=tensor_parallel_size)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {mesh!r}; it must be a jax.sharding.Mesh, or None")
    if set(mesh.axis_names) != set(AXES):
        raise ValueError(f"the mesh has axes {mesh.axis_names}; it must have {AXES}, size 1 where unused")
    if tensor_parallel_size not in (1, mesh.shape["tensor"]):
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} contradicts the mesh, whose tensor axis is "
            f"{mesh.shape['tensor']}; pass one of the two"
        )
    return mesh


def load_model(
    source: convert.Checkpoint | ModelConfig,
    mesh: Mesh,
    dtype: str,
    quantization: Quantization | None,
    seed: int,
    progress: bool,
    quantize_activations: bool = False,
) -> LoadedModel:
    """source: an open checkpoint, or a ModelConfig for random weights; quantization: what is asked for."""
    config = source if isinstance(source, ModelConfig) else source.config
    physical = for_tensor_parallel(config, mesh.shape["tensor"])
    resolved = weights.resolve_dtype(dtype, mesh.devices.flat[0].platform)
    quantization = _quantization(source, quantization)
    if not isinstance(source, ModelConfig) and source.format != "native" and quantization == source.quantization:
        tree = parameters.abstract(physical, resolved, functools.partial(sharding, mesh), quantization)
        if (cut := weights.cut_groups(tree)) is not None:
            log.warning("%s: %s; the projections are read as floats", source.path, cut)
            quantization = None
    if quantize_activations:
        _check_rounding(quantization)
    if isinstance(source, ModelConfig):
        loaded = weights.random_weights(physical, resolved, mesh, seed, quantization)
    else:
        abstract = weights.abstract_weights(physical, resolved, mesh, quantization)
        loaded = convert.load(source, abstract, physical, progress=progress)
        loaded, physical = weights.fold_head_norm(loaded, physical)
    if quantize_activations:
        loaded = weights.rounding_activations(loaded, physical)
        if physical.num_experts:
            log.info("activations that go into experts are not rounded; those of other projections are")
    return LoadedModel(physical, loaded, resolved, quantization)


def _check_rounding(quantization: Quantization | None) -> None:
    """ValueError unless these weights can be multiplied by activations in 8 bits."""
    if quantization is None or quantization.format not in ("int8", "fp8") or not quantization.layers:
        stored = "not quantized" if quantization is None else f"in {quantization.format}"
        raise ValueError(
            f"quantize_activations needs projections in int8 or fp8, and this model's are {stored}; pass "
            "quantization='int8' or 'fp8' with weights that are not quantized yet, or leave quantize_activations out"
        )


def _quantization(source: convert.Checkpoint | ModelConfig, wanted: Quantization | None) -> Quantization | None:
    """As the checkpoint stores its projections, or else as asked for, with a group size."""
    if isinstance(source, ModelConfig):
        return resolve(source, wanted)
    stored = source.quantization
    if stored is not None and wanted is not None and wanted.format != stored.format:
        raise ValueError(
            f"{source.path} is quantized to {stored.format} already, and quantization is {wanted.format!r}; leave "
            "quantization out, or load the checkpoint it was made from"
        )
    return resolve(source.config, wanted) if stored is None else stored


def build_engine(
    model: LoadedModel, mesh: Mesh, config: EngineConfig, tokenizer: Tokenizer | None, warm_up: bool, progress: bool
) -> Engine:
    """Size and allocate the cache, and compile every step shape if `warm_up`; otherwise each at its first use."""
    builder = BatchBuilder(
        config,
        groups=len(model.config.cache_groups),
        data_dependent=data_dependent(mesh.devices.flat[0].platform),
        widths=_table_widths(model, mesh, config),
        adapters=any("lora" in half for layer in model.weights["layers"].values() for half in layer.values()),
    )
    runner = StepRunner(model.config, model.weights, mesh)
    num_pages = _plan_pages(model, mesh, config, runner, builder)
    state = _abstract_state(model, mesh, config, num_pages)
    runner.state = State(
        cache.allocate(state.cache), jax.device_put(jnp.zeros(config.max_num_seqs, jnp.int32), sharding(mesh))
    )
    log.info("cache: %s pages of %d tokens", num_pages, config.cache.page_size)
    if warm_up:
        runner.compile(builder.shapes(), progress)
    return Engine(model.config, config, runner, builder, num_pages, tokenizer)


def _table_widths(model: LoadedModel, mesh: Mesh, config: EngineConfig) -> tuple[int, int]:
    """Few widths of block tables where decode attention is a kernel, which reads no further than a sequence."""
    dtype = cache.stored_dtype(config.cache.dtype, model.dtype)
    pages = cache.one_page(model.config, config.cache.page_size, dtype, mesh.shape["tensor"])
    return WIDTHS if paged_decode.obstacle(model.dtype, pages, target_of(mesh)) else KERNEL_WIDTHS


def _plan_pages(
    model: LoadedModel, mesh: Mesh, config: EngineConfig, runner: StepRunner, builder: BatchBuilder
) -> tuple[int, ...]:
    """The memory left after weights and a step's temporaries, both measured, in pages."""
    dtype, shards = cache.stored_dtype(config.cache.dtype, model.dtype), mesh.shape["tensor"]
    if config.cache.num_pages is not None:
        return cache.plan_pages(model.config, config, dtype, 0, shards)
    if mesh.devices.flat[0].platform == "cpu":
        free = memory.free_bytes(mesh, temporaries=0)
        return cache.plan_pages(model.config, config, dtype, free, shards)
    small = _abstract_state(model, mesh, config, cache.pages_per_sequence(model.config, config))
    programs = [runner.lower(shape, small).compile() for shape in largest_shapes(builder.shapes())]
    temporaries = max(compilation.temporary_bytes(program) for program in programs)
    outputs = max(compilation.output_bytes(program) for program in programs) * config.steps_in_flight
    free = memory.free_bytes(mesh, temporaries + outputs)
    return cache.plan_pages(model.config, config, dtype, free, shards)


def largest_shapes(shapes: Sequence[BatchShape]) -> list[BatchShape]:
    """The decode, the ragged and the scored shape whose programs need the most memory."""
    largest: dict[tuple[bool, bool], BatchShape] = {}
    for shape in sorted(shapes, key=lambda shape: (shape.tokens, shape.width, shape.sampling != "greedy")):
        largest[shape.decode, shape.scored] = shape
    return list(largest.values())


def _abstract_state(model: LoadedModel, mesh: Mesh, config: EngineConfig, num_pages: tuple[int, ...]) -> AbstractState:
    last_ids = jax.ShapeDtypeStruct((config.max_num_seqs,), jnp.int32, sharding=sharding(mesh))
    dtype = cache.stored_dtype(config.cache.dtype, model.dtype)
    kept = cache.abstract_cache(model.config, num_pages, config.cache.page_size, dtype, mesh, config.max_num_seqs)
    return State(kept, last_ids)  # type: ignore[arg-type]
