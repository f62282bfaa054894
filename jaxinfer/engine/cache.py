"""The paged KV cache: how big it is, and its arrays."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ModelConfig
from meshes import sharding
from pallas_kernels.kv_pages import KVPages, abstract_pages

AXES = ("pages", "kv_heads")
"""Logical axes that lead every leaf of KVPages; the rest lies whole on every device."""


def stored_dtype(name: str, model_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of `CacheConfig.dtype`."""
    return {"auto": model_dtype, "int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}[name]


def abstract_cache(
    config: ModelConfig, num_pages: tuple[int, ...], page_size: int, dtype: jnp.dtype, mesh: Mesh
) -> list[KVPages]:
    """Shapes and shardings of every layer's pages. config: as laid out for the mesh; num_pages: per cache group."""
    layers: dict[int, KVPages] = {}
    for group, pages in zip(config.cache_groups, num_pages, strict=True):
        pool = abstract_pages(
            pages, config.num_kv_heads, page_size, config.head_dim, dtype, sharding=sharding(mesh, AXES)
        )
        layers |= dict.fromkeys(group.layers, pool)
    return [layers[layer] for layer in range(config.num_layers)]


def allocate(abstract: list[KVPages]) -> list[KVPages]:
    """Zeroed pages, made on their devices."""
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )
    return zeros()


def pages_per_sequence(config: ModelConfig, engine: EngineConfig) -> tuple[int, ...]:
    """Pages that one sequence of max_model_len takes at most, per cache group."""
    page_size, chunk = engine.cache.page_size, engine.max_num_batched_tokens
    return tuple(group.most_pages(engine.max_model_len, page_size, chunk) for group in config.cache_groups)


def plan_pages(
    config: ModelConfig, engine: EngineConfig, dtype: jnp.dtype, free_bytes: int, shards: int
) -> tuple[int, ...]:
    """Pages per cache group: what `max_num_seqs` sequences of `max_model_len` take, or as much of it as fits.

    dtype: as stored; free_bytes: on one device; shards: devices that share the kv heads. Groups shrink together, so
    that none starves.
    Raises ValueError if not even one sequence fits.
    """
    wanted = pages_per_sequence(config, engine)
    if engine.cache.num_pages is not None:
        return tuple(engine.cache.num_pages for _ in wanted)
    page = abstract_pages(1, config.num_kv_heads // shards, engine.cache.page_size, config.head_dim, dtype)
    page_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(page))
    layers = [len(group.layers) for group in config.cache_groups]
    one_sequence = sum(pages * count * page_bytes for pages, count in zip(wanted, layers, strict=True))
    sequences = min(engine.max_num_seqs, free_bytes / one_sequence)
    if sequences < 1:
        raise ValueError(
            f"the cache of one sequence of max_model_len {engine.max_model_len} takes {one_sequence / 2**20:.0f} MiB a "
            f"device, and {max(0, free_bytes) / 2**20:.0f} MiB are left; lower max_model_len, or raise memory_fraction "
            "on a GPU"
        )
    return tuple(int(pages * sequences) for pages in wanted)
