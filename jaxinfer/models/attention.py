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
from jaxinfer.parameters import Tree, attention_parameters
from jaxinfer.weights import partition_specs
from meshes import partition_spec
from pallas_kernels.cache_append import cache_append
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.target import Target


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["decode", "target"],
    data_fields=["cos", "sin", "page_ids", "offsets", "block_tables", "query_start", "lengths", "plan"],
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
    plan: Any
    """How the attention kernel divides its work, by `make_plan`; None where there is no kernel."""
    decode: bool
    """Whether every sequence has exactly one token, so that row b is sequence b."""
    target: Target
    """What the step is compiled for: it decides which kernels run."""


class Attention(nnx.Module):
    """qkv projection, RoPE, append to the cache, attend over it, output projection."""

    def __init__(self, config: ModelConfig, layer: int, weights: Tree, mesh: Mesh):
        self.config = config
        self.window = config.window(layer)
        self.mesh = mesh
        self.qkv = nnx.Param(weights["qkv"])
        self.out = nnx.Param(weights["out"])
        self.qkv_bias = nnx.Param(weights["qkv_bias"]) if config.qkv_bias else None
        self.out_bias = nnx.Param(weights["out_bias"]) if config.out_bias else None
        self.q_norm = RMSNorm(config.norm_eps, weights["q_norm"]) if config.qk_norm else None
        self.k_norm = RMSNorm(config.norm_eps, weights["k_norm"]) if config.qk_norm else None

    def __call__(
        self, x: jax.Array, norm: RMSNorm, cache: KVPages, inputs: AttentionInputs
    ) -> tuple[jax.Array, KVPages]:
        """x + attention(norm(x)), [tokens, embed], and the cache with these tokens in it.

        Each shard projects, appends and attends for its own kv heads; one all-reduce.
        """
        parameters = attention_parameters(self.config)
        weights: Tree = {name: value(getattr(self, name)) for name in parameters if not name.endswith("_norm")}
        if self.q_norm is not None and self.k_norm is not None:
            weights |= {"q_norm": {"scale": value(self.q_norm.scale)}, "k_norm": {"scale": value(self.k_norm.scale)}}
        pages, whole = partition_spec(("pages", "kv_heads")), partition_spec(())
        shard = jax.shard_map(
            functools.partial(_attention, config=self.config, window=self.window, shards=self.mesh.shape["tensor"]),
            mesh=self.mesh,
            in_specs=(whole, whole, jax.tree.map(partition_specs, parameters, weights), pages, whole),
            out_specs=(whole, pages),
            check_vma=False,
        )
        return shard(x, value(norm.scale), weights, cache, inputs)


def _attention(
    x: jax.Array,
    norm: jax.Array,
    weights: Tree,
    cache: KVPages,
    inputs: AttentionInputs,
    *,
    config: ModelConfig,
    window: int | None,
    shards: int,
) -> tuple[jax.Array, KVPages]:
    normed = rms_norm(x, norm, eps=config.norm_eps, target=inputs.target)
    qkv = linear(normed, weights["qkv"], weights.get("qkv_bias"), target=inputs.target)
    q_norm, k_norm = (weights[name]["scale"] if name in weights else None for name in ("q_norm", "k_norm"))
    out, cache = _append_and_attend(qkv, q_norm, k_norm, cache, inputs, config=config, window=window)
    project = functools.partial(linear, out, weights["out"], contract=3, target=inputs.target)
    if shards == 1:
        return project(weights.get("out_bias"), x), cache
    out = x + jax.lax.psum(project(), "tensor")
    return out + weights["out_bias"] if "out_bias" in weights else out, cache


def _append_and_attend(
    qkv: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    cache: KVPages,
    inputs: AttentionInputs,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, KVPages]:
    """qkv: [tokens, kv_heads, q_per_kv + 2, head_dim], of this shard. Returns [tokens, kv_heads, q_per_kv, head_dim].

    Append first: attending to the old pages after the write would copy the pool.
    """
    options: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "norm_eps": config.norm_eps, "target": inputs.target}
    q, cache = cache_append(qkv, inputs.cos, inputs.sin, cache, inputs.page_ids, inputs.offsets, **options)
    options = {"scale": config.head_dim**-0.5, "window": window, "plan": inputs.plan, "target": inputs.target}
    if inputs.decode:
        out = paged_decode(q, cache, inputs.block_tables, inputs.lengths, **options)
    else:
        out = paged_prefill(q, cache, inputs.block_tables, inputs.query_start, inputs.lengths, **options)
    return out, cache
