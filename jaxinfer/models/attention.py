"""Grouped-query attention over the paged cache. The only place where kernels meet the mesh."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.models.layers import RMSNorm, linear, value
from jaxinfer.parameters import Tree
from meshes import partition_spec
from pallas_kernels.cache_append import cache_append
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.tiles import Tiles

CacheLayer = dict[str, jax.Array]
"""One layer's pages: k and v, each [pages, kv_heads, page_size, head_dim]."""

CACHE_AXES = ("pages", "kv_heads", "page", "head_dim")


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["decode", "tiles"],
    data_fields=[
        "cos",
        "sin",
        "page_ids",
        "offsets",
        "block_tables",
        "query_start",
        "lengths",
    ],
)
@dataclass(frozen=True)
class AttentionInputs:
    """Where a step's tokens stand: the same for every layer of a cache group."""

    cos: jax.Array
    """[tokens, head_dim / 2] f32"""
    sin: jax.Array
    page_ids: jax.Array
    """[tokens] i32: the page each token is written to; past the last page: dropped."""
    offsets: jax.Array
    """[tokens] i32: its place in that page."""
    block_tables: jax.Array
    """[batch, width] i32"""
    query_start: jax.Array
    """[batch + 1] i32: where each sequence's tokens start."""
    lengths: jax.Array
    """[batch] i32: tokens in the cache after this step."""
    decode: bool
    """Whether every sequence has exactly one token, so that row b is sequence b."""
    tiles: Tiles
    """How much portable attention takes at once."""


class Attention(nnx.Module):
    """qkv projection, RoPE, append to the cache, attend over it, output projection."""

    def __init__(self, config: ModelConfig, layer: int, weights: Tree, mesh: Mesh):
        self.q_per_kv = config.q_per_kv
        self.scale = config.head_dim**-0.5
        self.window = config.window(layer)
        self.mesh = mesh
        self.qkv = nnx.Param(weights["qkv"])
        self.out = nnx.Param(weights["out"])
        self.qkv_bias = nnx.Param(weights["qkv_bias"]) if config.qkv_bias else None
        self.out_bias = nnx.Param(weights["out_bias"]) if config.out_bias else None
        self.q_norm = RMSNorm(config.norm_eps, weights["q_norm"]) if config.qk_norm else None
        self.k_norm = RMSNorm(config.norm_eps, weights["k_norm"]) if config.qk_norm else None

    def __call__(self, x: jax.Array, cache: CacheLayer, inputs: AttentionInputs) -> tuple[jax.Array, CacheLayer]:
        """x: [tokens, embed]; returns the same shape, and the cache with these tokens in it."""
        qkv = linear(x, self.qkv[...], value(self.qkv_bias))  # [tokens, kv_heads, q_per_kv + 2, head_dim]
        q, k, v = qkv[:, :, : self.q_per_kv], qkv[:, :, -2], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, k_pages, v_pages = self._attend(q, k, v, cache["k"], cache["v"], inputs)
        return linear(out, self.out[...], value(self.out_bias), contract=3), {"k": k_pages, "v": v_pages}

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        k_pages: jax.Array,
        v_pages: jax.Array,
        inputs: AttentionInputs,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Each shard appends and attends for its own kv heads; nothing is communicated."""
        heads = partition_spec((None, "kv_heads", None, None))
        one_per_head = partition_spec((None, "kv_heads", None))
        pages = partition_spec(CACHE_AXES)
        shard = jax.shard_map(
            functools.partial(_append_and_attend, scale=self.scale, window=self.window),
            mesh=self.mesh,
            in_specs=(heads, one_per_head, one_per_head, pages, pages, partition_spec(())),
            out_specs=(heads, pages, pages),
            check_vma=False,
        )
        return shard(q, k, v, k_pages, v_pages, inputs)


def _append_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Append first: attending to the old pages after the write would copy the pool."""
    q, k_pages, v_pages = cache_append(
        q, k, v, inputs.cos, inputs.sin, k_pages, v_pages, inputs.page_ids, inputs.offsets
    )
    tables, lengths = inputs.block_tables, inputs.lengths
    options: dict[str, Any] = {"scale": scale, "window": window, "tiles": inputs.tiles}
    if inputs.decode:
        out = paged_decode(q, k_pages, v_pages, tables, lengths, **options)
    else:
        out = paged_prefill(q, k_pages, v_pages, tables, inputs.query_start, lengths, **options)
    return out, k_pages, v_pages
