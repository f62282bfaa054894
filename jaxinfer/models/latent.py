"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): all heads' keys and values come from one latent."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import Attention, AttentionInputs, append_and_attend
from jaxinfer.models.layers import linear, summed
from jaxinfer.models.norms import enter, leave
from jaxinfer.models.observe import observe
from jaxinfer.parameters import Tree
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.rms_norm import rms_norm

NORM_EPS = 1e-6
"""Of the norms of latents, whatever that of the others is."""


def latent_attention(
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
    """Attention over the latents themselves: what makes keys of them is applied to the queries, and what makes values
    of them to the results, so that the cache holds one vector a token, for all heads.
    """
    x, inner = enter(x, delta, norms, config, inputs.target, weights["kv_a"])
    rope, queries = config.qk_rope_dim, inner
    normalise = functools.partial(rms_norm, eps=NORM_EPS, target=inputs.target)

    def project(x: jax.Array, name: str) -> jax.Array:
        observe(f"attention.{name}", x)
        return linear(x, weights[name], target=inputs.target)

    if config.q_lora_rank:
        queries = normalise(project(inner, "q_a"), weights["q_a_norm"]["scale"])
    q = project(queries, "q_b")  # [tokens, heads, qk_nope_dim + qk_rope_dim]
    latent = project(inner, "kv_a")
    latent, turned = latent[:, : config.kv_lora_rank], latent[:, config.kv_lora_rank :]
    key = jnp.concatenate([turned, normalise(latent, weights["kv_a_norm"]["scale"])], axis=-1)[:, None]
    to_keys, to_values = jnp.split(weights["kv_b"], [config.qk_nope_dim], axis=1)
    absorbed = product("thn,hnl->thl", q[..., : config.qk_nope_dim], to_keys)
    q = jnp.concatenate([q[..., config.qk_nope_dim :], absorbed], axis=-1)
    qkv = jnp.concatenate([q, key], axis=1)[:, None]  # keys are the values: of those, RoPE's part goes unread
    out, cache = append_and_attend(qkv, weights, cache, inputs, config=config, window=window, shards=shards)
    values = product("thl,hvl->thv", out[:, 0, :, rope:], to_values)
    observe("attention.heads_out", values)
    part = functools.partial(linear, values, weights["heads_out"], contract=2, target=inputs.target)
    out = summed(part, None, shards)
    return *leave(x, out, norms, config, inputs.target), cache


def product(formula: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """In x's dtype; float32 is not rounded to TF32."""
    return jnp.einsum(formula, x, weight, precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


class LatentAttention(Attention):
    """In the place of `Attention`, with other projections."""

    compute = staticmethod(latent_attention)
