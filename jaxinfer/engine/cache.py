"""What layers keep of the sequences, pages of keys and values or states: how big it is, and its arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.models.decoder import Kept
from jaxinfer.models.recurrent import abstract_state
from meshes import sharding
from pallas_kernels.kv_pages import KVPages, abstract_pages

AXES, STATE_AXES = ("pages", "kv_heads"), ("slots", "heads")
"""Logical axes that lead every leaf of KVPages, and of a RecurrentState; the rest lies whole on every device."""


def stored_dtype(name: str, model_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of `CacheConfig.dtype`."""
    return {"auto": model_dtype, "int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}[name]


def abstract_cache(
    config: ModelConfig,
    num_pages: tuple[int, ...],
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    max_num_seqs: int | None = None,
) -> list[Kept]:
    """Shapes and shardings of what every layer keeps.

    config: as laid out for the mesh; num_pages: per cache group; dtype: of the pages; max_num_seqs: states, which
    recurrent layers need.
    """
    layers: dict[int, Kept] = {}
    if config.recurrent_layers:
        if max_num_seqs is None:
            raise ValueError("recurrent layers keep a state per sequence: say for how many, max_num_seqs")
        state = abstract_state(config, max_num_seqs, sharding(mesh, STATE_AXES))
        layers = dict.fromkeys(config.recurrent_layers, state)
    for group, pages in zip(config.cache_groups, num_pages, strict=True):
        pool = _pool(config, pages, config.num_kv_heads, page_size, dtype, sharding=sharding(mesh, AXES))
        layers |= dict.fromkeys(group.layers, pool)
    return [layers[layer] for layer in range(config.num_layers)]


def _pool(
    config: ModelConfig, num_pages: int, kv_heads: int, page_size: int, dtype: jnp.dtype, **options: Any
) -> KVPages:
    return abstract_pages(num_pages, kv_heads, page_size, config.head_dim, dtype, shared=config.shares_kv, **options)


def one_page(config: ModelConfig, page_size: int, dtype: jnp.dtype, shards: int) -> KVPages:
    """The shapes of a page of one layer on one device. shards: devices that share the kv heads."""
    return _pool(config, 1, config.num_kv_heads // shards, page_size, dtype)


def allocate(abstract: list[Kept]) -> list[Kept]:
    """Zeroed pages and states, made on their devices."""
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )
    return zeros()


def pages_per_sequence(config: ModelConfig, engine: EngineConfig) -> tuple[int, ...]:
    """Pages that one sequence of max_model_len takes at most, per cache group."""
    page_size, step = engine.cache.page_size, engine.max_num_batched_tokens
    return tuple(group.most_pages(engine.max_model_len, page_size, step) for group in config.cache_groups)


def plan_pages(
    config: ModelConfig, engine: EngineConfig, dtype: jnp.dtype, free_bytes: int, shards: int
) -> tuple[int, ...]:
    """Pages per cache group: what `max_num_seqs` sequences of `max_model_len` take, or as much of it as fits.

    dtype: as stored; free_bytes: on one device; shards: devices that share the kv heads. Groups shrink together, so
    that none starves. The states of recurrent layers come first, for all `max_num_seqs` sequences.
    Raises ValueError if not even one sequence fits.
    """
    wanted = pages_per_sequence(config, engine)
    if engine.cache.num_pages is not None:
        return tuple(engine.cache.num_pages for _ in wanted)
    states = config.state_bytes * engine.max_num_seqs // shards
    page = one_page(config, engine.cache.page_size, dtype, shards)
    page_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(page))
    layers = [len(group.layers) for group in config.cache_groups]
    one_sequence = sum(pages * count * page_bytes for pages, count in zip(wanted, layers, strict=True))
    left = free_bytes - states
    sequences = min(engine.max_num_seqs, left / one_sequence)
    if sequences < 1:
        kept = f" beside {states / 2**20:.0f} MiB of states for max_num_seqs {engine.max_num_seqs}" if states else ""
        raise ValueError(
            f"the cache of one sequence of max_model_len {engine.max_model_len} takes {one_sequence / 2**20:.0f} MiB a "
            f"device, and {max(0, left) / 2**20:.0f} MiB are left{kept}; lower max_model_len"
            f"{' or max_num_seqs' if states else ''}, or raise memory_fraction on a GPU"
        )
    return tuple(int(pages * sequences) for pages in wanted)
