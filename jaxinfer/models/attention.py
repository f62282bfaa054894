"""Grouped-query attention over the paged cache. The only place where kernels meet the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxinfer.config import ModelConfig
from jaxinfer.models.layers import linear, summed, value
from jaxinfer.models.lora import added, lora_of, with_lora
from jaxinfer.models.norms import Norm, enter, folded, leave, norm_scale, normalise_heads
from jaxinfer.models.observe import observe
from jaxinfer.parameters import Tree, attention_parameters
from jaxinfer.weights import partition_specs
from meshes import partition_spec
from pallas_kernels.cache_append import cache_append
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.norm_matmul import norm_projection
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.target import Target


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["decode", "target", "chunk"],
    data_fields=[
        "cos",
        "sin",
        "query_scale",
        "page_ids",
        "offsets",
        "block_tables",
        "query_start",
        "lengths",
        "plan",
        "places",
    ],
)
@dataclass(frozen=True)
class AttentionInputs:
    """Where a step's tokens stand: the same for every layer of a cache group with the same RoPE."""

    cos: jax.Array | None
    """[tokens, pairs] f32: of the pairs of dimensions that RoPE turns; None: it turns none."""
    sin: jax.Array | None
    query_scale: jax.Array | None
    """[tokens] f32: what each token's query is multiplied by, after RoPE; None: by nothing."""
    page_ids: jax.Array
    """[tokens] i32: the page each token is written to; past the last page: dropped."""
    offsets: jax.Array
    """[tokens] i32: its place in that page."""
    block_tables: jax.Array
    """[batch, width] i32. Where chunks are taken apart, each is a sequence here (`engine/chunks.py`)."""
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
    chunk: int | None
    """No token looks further back than to the start of its chunk of so many; None: no chunks, or taken apart."""
    places: jax.Array | None = None
    """[tokens] i32: the place of each token's adapter; None: there are no places."""


def _attention(
    x: jax.Array,
    delta: jax.Array | None,
    norms: Tree,
    weights: Tree,
    cache: KVPages,
    inputs: AttentionInputs,
    *,
    config: ModelConfig,
    window: int | None,
    shards: int,
) -> tuple[jax.Array, jax.Array | None, KVPages]:
    into = None if "lora" in weights else weights["qkv"]
    norm = folded(delta, norms, config, inputs.target, into)
    if norm is not None:
        x, qkv = norm_projection(x, norm, weights["qkv"], weights.get("qkv_bias"), target=inputs.target)
    else:
        x, inner = enter(x, delta, norms, config, inputs.target, into)
        observe("attention.qkv", inner)
        qkv = linear(inner, weights["qkv"], weights.get("qkv_bias"), target=inputs.target)
        qkv = added(qkv, inner, weights, "qkv")
    qkv, gate = qkv[:, :, : config.q_per_kv + 2], qkv[:, :, config.q_per_kv + 2 :]
    out, cache = append_and_attend(qkv, weights, cache, inputs, config=config, window=window, shards=shards)
    if config.attention_gate:
        out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)
    observe("attention.out", out)
    project = functools.partial(linear, out, weights["out"], contract=3, target=inputs.target)
    out = summed(with_lora(project, out, weights, "out"), weights.get("out_bias"), shards)
    return *leave(x, out, norms, config, inputs.target), cache


def append_and_attend(
    qkv: jax.Array,
    weights: Tree,
    cache: KVPages,
    inputs: AttentionInputs,
    *,
    config: ModelConfig,
    window: int | None,
    shards: int,
) -> tuple[jax.Array, KVPages]:
    """qkv: [tokens, kv_heads, q_per_kv + 2, head_dim], of this shard (+ 1 where keys are the values). Returns
    [tokens, kv_heads, q_per_kv, head_dim].

    Append first: attending to the old pages after the write would copy the pool.
    """
    options: dict[str, Any] = {"norm_eps": config.norm_eps, "target": inputs.target}
    if config.qk_norm_with_rope:
        ones = jnp.ones(config.head_dim, jnp.float32)
        options |= {} if inputs.cos is None else {"q_norm": ones, "k_norm": ones}
    elif config.qk_norm and config.norm == "rms" and config.qk_norm_span == "head":
        options |= {name: norm_scale(weights[name], config) for name in ("q_norm", "k_norm")}
    elif config.qk_norm:
        qkv = normalise_heads(qkv, weights["q_norm"]["scale"], weights["k_norm"]["scale"], config, shards)
    if config.qkv_clip is not None:
        qkv = jnp.clip(qkv, -config.qkv_clip, config.qkv_clip)
    q, cache = cache_append(qkv, inputs.cos, inputs.sin, cache, inputs.page_ids, inputs.offsets, **options)
    if inputs.query_scale is not None:
        q = (q * inputs.query_scale[:, None, None, None]).astype(q.dtype)
    options = {
        "scale": config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        "window": window,
        "chunk": inputs.chunk,
        "soft_cap": config.attention_soft_cap,
        "plan": inputs.plan,
        "target": inputs.target,
    }
    if config.sinks:
        options["sinks"] = weights["sinks"].astype(jnp.float32)
    if config.alibi_max_bias is not None:
        options["alibi_slopes"] = of_this_shard(alibi_slopes(config), shards)
    if inputs.decode:
        out = paged_decode(q, cache, inputs.block_tables, inputs.lengths, **options)
    else:
        options["causal"] = not config.bidirectional
        out = paged_prefill(q, cache, inputs.block_tables, inputs.query_start, inputs.lengths, **options)
    return out, cache


def of_this_shard(heads: NDArray[np.float32], shards: int) -> jax.Array:
    """The kv heads of this device. heads: [kv_heads, ...], of all."""
    local = heads.shape[0] // shards
    if shards == 1:
        return jnp.asarray(heads)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(heads), jax.lax.axis_index("tensor") * local, local)


def alibi_slopes(config: ModelConfig) -> NDArray[np.float32]:
    """[kv_heads, q_per_kv]: 2 to the power of - max_bias · i / n for the i-th of n heads (Press et al. 2022).

    Of a number of heads that is no power of two, the larger half of the next one: its even terms, then odd ones.
    """
    assert config.alibi_max_bias is not None
    most = 1 << (config.num_heads - 1).bit_length()
    slopes = 2.0 ** (-config.alibi_max_bias * np.arange(1, most + 1) / most)
    if most != config.num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[: config.num_heads]
    return (slopes * config.alibi_scale).astype(np.float32).reshape(config.num_kv_heads, config.q_per_kv)


class Attention(nnx.Module):
    """qkv projection, RoPE, append to the cache, attend over it, output projection."""

    parameters = staticmethod(attention_parameters)
    compute: Callable[..., Any] = staticmethod(_attention)
    """What each shard does."""
    cache_axes = ("pages", "kv_heads")
    """Logical axes that lead every leaf of what the layer keeps; the rest lies whole on every device."""

    def __init__(self, config: ModelConfig, layer: int, weights: Tree, mesh: Mesh):
        self.config = config
        self.window = config.window(layer)
        self.mesh = mesh
        for name, parameter in self.parameters(config).items():
            make = functools.partial(Norm, config) if isinstance(parameter, dict) else nnx.Param
            setattr(self, name, make(weights[name]))
        self.lora = lora_of(weights)

    def __call__[Kept](
        self, x: jax.Array, delta: jax.Array | None, norms: Tree, cache: Kept, inputs: Any
    ) -> tuple[jax.Array, jax.Array | None, Kept]:
        """x + delta, and attention(norm(x + delta)), the next delta; each [tokens, embed]; the cache with these tokens.

        norms: as in `norms.enter`. Each shard projects, appends and attends for its own kv heads; one all-reduce.
        """
        parameters = self.parameters(self.config)
        weights: Tree = {name: _values(getattr(self, name)) for name in parameters}
        specs = jax.tree.map(partition_specs, parameters, weights)
        if self.lora is not None and inputs.places is not None:
            weights["lora"], specs["lora"] = self.lora.operands(parameters, inputs.places)
        kept, whole = partition_spec(self.cache_axes), partition_spec(())
        options = {"config": self.config, "shards": self.mesh.shape["tensor"], **self.options()}
        shard = jax.shard_map(
            functools.partial(self.compute, **options),
            mesh=self.mesh,
            in_specs=(whole, whole, whole, specs, kept, whole),
            out_specs=(whole, whole, kept),
            check_vma=False,
        )
        return shard(x, delta, norms, weights, cache, inputs)

    def options(self) -> dict[str, Any]:
        """What `compute` takes besides."""
        return {"window": self.window}


def _values(part: Norm | nnx.Param) -> Any:
    return part.weights() if isinstance(part, Norm) else value(part)
