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
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.target import Target


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["decode", "target"],
    data_fields=["cos", "sin", "page_ids", "offsets", "block_tables", "query_start", "lengths"],
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
    target: Target
    """What the step is compiled for: it decides which kernels run."""


class Attention(nnx.Module):
    """qkv projection, RoPE, append to the cache, attend over it, output projection."""

    def __init__(self, config: ModelConfig, layer: int, weights: Tree, mesh: Mesh):
        self.scale = config.head_dim**-0.5
        self.window = config.window(layer)
        self.mesh = mesh
        self.qkv = nnx.Param(weights["qkv"])
        self.out = nnx.Param(weights["out"])
        self.qkv_bias = nnx.Param(weights["qkv_bias"]) if config.qkv_bias else None
        self.out_bias = nnx.Param(weights["out_bias"]) if config.out_bias else None
        self.norm_eps = config.norm_eps
        self.q_norm = RMSNorm(config.norm_eps, weights["q_norm"]) if config.qk_norm else None
        self.k_norm = RMSNorm(config.norm_eps, weights["k_norm"]) if config.qk_norm else None

    def __call__(self, x: jax.Array, cache: KVPages, inputs: AttentionInputs) -> tuple[jax.Array, KVPages]:
        """x: [tokens, embed]; returns the same shape, and the cache with these tokens in it."""
        qkv = linear(x, self.qkv[...], value(self.qkv_bias))  # [tokens, kv_heads, q_per_kv + 2, head_dim]
        out, cache = self._attend(qkv, cache, inputs)
        return linear(out, self.out[...], value(self.out_bias), contract=3), cache

    def _attend(self, qkv: jax.Array, cache: KVPages, inputs: AttentionInputs) -> tuple[jax.Array, KVPages]:
        """Each shard appends and attends for its own kv heads; nothing is communicated."""
        heads, pages, whole = (partition_spec(axes) for axes in ((None, "kv_heads"), ("pages", "kv_heads"), ()))
        shard = jax.shard_map(
            functools.partial(_append_and_attend, scale=self.scale, window=self.window, norm_eps=self.norm_eps),
            mesh=self.mesh,
            in_specs=(heads, whole, whole, pages, whole),
            out_specs=(heads, pages),
            check_vma=False,
        )
        q_norm, k_norm = (None if norm is None else norm.scale[...] for norm in (self.q_norm, self.k_norm))
        return shard(qkv, q_norm, k_norm, cache, inputs)


def _append_and_attend(
    qkv: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cache: KVPages,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None,
    norm_eps: float,
) -> tuple[jax.Array, KVPages]:
    """Append first: attending to the old pages after the write would copy the pool."""
    options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": norm_eps, "target": inputs.target}
    q, cache = cache_append(qkv, inputs.cos, inputs.sin, cache, inputs.page_ids, inputs.offsets, **options)
    options = {"scale": scale, "window": window, "target": inputs.target}
    if inputs.decode:
        out = paged_decode(q, cache, inputs.block_tables, inputs.lengths, **options)
    else:
        out = paged_prefill(q, cache, inputs.block_tables, inputs.query_start, inputs.lengths, **options)
    return out, cache
