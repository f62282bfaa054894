"""cache_append in plain JAX: one scatter for each leaf of the pages, in place when they are donated."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pages import KVPages, quantize_tokens


def cache_append(
    qkv: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    pages: KVPages,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    norm_eps: float,
    interleaved: bool,
    platform: str,
) -> tuple[jax.Array, KVPages]:
    """Shapes as in `api.cache_append`; platform: as in `jax.Device.platform`."""
    if cos is not None and sin is not None:
        cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    v = None if pages.shared else qkv[:, :, -1]
    qk = qkv if v is None else qkv[:, :, :-1]
    # One more axis than heads need: queries and keys then share their shape up to the number of heads.
    q = rotate(rms_norm(qk[:, :, :-1], q_norm, norm_eps), cos, sin, interleaved).astype(qkv.dtype)
    k = rotate(rms_norm(qk[:, :, -1:], k_norm, norm_eps), cos, sin, interleaved)[:, :, 0]
    return q, write(pages, k, v, page_ids, offsets, platform)


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """Over the last dimension, in float32, which is returned (Zhang & Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    if scale is None:
        return wide
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * scale.astype(jnp.float32)


def rotate(x: jax.Array, cos: jax.Array | None, sin: jax.Array | None, interleaved: bool) -> jax.Array:
    """RoPE on the first dimensions. x: [..., head_dim] f32; cos, sin: broadcast to [..., pairs]."""
    if cos is None or sin is None:
        return x
    rotary = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        low, high = turned[..., 0::2], turned[..., 1::2]
    else:
        low, high = jnp.split(turned, 2, axis=-1)
    out = [low * cos - high * sin, high * cos + low * sin]
    if interleaved:
        out = [jnp.stack(out, axis=-1).reshape(turned.shape)]
    return jnp.concatenate([*out, rest], axis=-1)


def write(
    pages: KVPages, k: jax.Array, v: jax.Array | None, page_ids: jax.Array, offsets: jax.Array, platform: str
) -> KVPages:
    """k, v: [tokens, kv_heads, head_dim]; v: None of shared pages; a page id past the last page drops its token."""

    def place(leaf: jax.Array, values: jax.Array, innermost: bool = False) -> jax.Array:
        values = values.astype(leaf.dtype)
        if leaf.dtype != jnp.float8_e4m3fn:
            return scatter(leaf, values, page_ids, offsets, innermost)
        # XLA scatters fp8 by widening the pool. Its bits do as well where they are free to reinterpret: not on CPU.
        if platform == "cpu":
            return one_by_one(leaf, values, page_ids, offsets, innermost)
        bits, values = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (leaf, values))
        return jax.lax.bitcast_convert_type(scatter(bits, values, page_ids, offsets, innermost), leaf.dtype)

    def write_leaf(
        leaf: jax.Array, scales: jax.Array | None, x: jax.Array, innermost: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        if scales is None:
            return place(leaf, x, innermost), None
        x, new = quantize_tokens(x, pages.dtype)
        return place(leaf, x, innermost), place(scales, new)

    new_k, k_scales = write_leaf(pages.k, pages.k_scales, k)
    if pages.v is None or v is None:
        return dataclasses.replace(pages, k=new_k, k_scales=k_scales)
    new_v, v_scales = write_leaf(pages.v, pages.v_scales, v, pages.v_transposed)
    return dataclasses.replace(pages, k=new_k, v=new_v, k_scales=k_scales, v_scales=v_scales)


def scatter(leaf: jax.Array, values: jax.Array, page_ids: jax.Array, offsets: jax.Array, innermost: bool) -> jax.Array:
    """leaf: [pages, kv_heads, page_size, ...], or with tokens `innermost`; values: [tokens, kv_heads, ...]."""
    places = leaf.at[page_ids, :, :, offsets] if innermost else leaf.at[page_ids, :, offsets]
    return places.set(values, mode="drop", unique_indices=True)


def one_by_one(
    leaf: jax.Array, values: jax.Array, page_ids: jax.Array, offsets: jax.Array, innermost: bool
) -> jax.Array:
    """The same, a token at a time. leaf: [pages, kv_heads, page_size, head_dim], or transposed."""
    token_axis = 3 if innermost else 2
    values = jnp.expand_dims(values, (1, token_axis + 1))  # [tokens, 1, kv_heads, 1, head_dim]
    kept = page_ids < leaf.shape[0]
    # A dropped token writes a kept one again: reading what to leave as it is would copy the pool.
    sources = jnp.where(kept, jnp.arange(len(page_ids)), jnp.argmax(kept)) if len(page_ids) else page_ids

    def step(i: jax.Array, leaf: jax.Array) -> jax.Array:
        token = sources[i]
        start = [jnp.int32(0)] * 4
        start[0], start[token_axis] = page_ids[token], offsets[token]
        return jax.lax.dynamic_update_slice(leaf, values[token], start)

    return jax.lax.fori_loop(0, jnp.where(kept.any(), len(page_ids), 0), step, leaf)
