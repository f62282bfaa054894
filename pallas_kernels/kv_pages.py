"""One layer's keys and values in pages: in the model's dtype, or in 8 bits with a scale per token and head."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import check_shape

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of a cache dtype that needs scales."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "k_scales", "v_scales"],
    meta_fields=["v_transposed"],
)
@dataclass(frozen=True)
class KVPages:
    """A pool of pages. Slots that hold no token may hold anything, NaN included."""

    k: jax.Array
    """[pages, kv_heads, page_size, head_dim]"""
    v: jax.Array | None
    """The same, or [pages, kv_heads, head_dim, page_size] if `v_transposed`. None: the keys are the values, too."""
    k_scales: jax.Array | None = None
    """[pages, kv_heads, page_size] f32 of an 8-bit cache: key = scale x stored. None: k is stored as it is."""
    v_scales: jax.Array | None = None
    v_transposed: bool = False
    """8-bit matrix units read a page of values only with its tokens innermost."""

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def quantized(self) -> bool:
        return self.k_scales is not None

    @property
    def shared(self) -> bool:
        """Whether the keys are the values, too (multi-head latent attention)."""
        return self.v is None

    @property
    def dtype(self) -> jnp.dtype:
        """As stored."""
        return jnp.dtype(self.k.dtype)

    def check(self) -> None:
        """ValueError unless the leaves belong together."""
        pages, heads, size, dim = self.k.shape
        if self.v is not None:
            check_shape("v", self.v, (pages, heads, dim, size) if self.v_transposed else (pages, heads, size, dim))
            if (self.k_scales is None) != (self.v_scales is None):
                raise ValueError("the cache has scales of keys or of values only; an 8-bit cache needs both")
        elif self.v_scales is not None:
            raise ValueError("the cache has scales of values, and no values; pages whose keys are the values have none")
        for name, scales in (("k_scales", self.k_scales), ("v_scales", self.v_scales)):
            if scales is not None:
                check_shape(name, scales, (pages, heads, size))
        if (self.dtype.name in LARGEST) != self.quantized:
            raise ValueError(
                f"pages of {self.dtype.name} with{'' if self.quantized else 'out'} scales; 8 bits need them"
            )

    def gather(self, page_ids: jax.Array, heads: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values of some pages as `dtype`, [*lead, pages * page_size, head_dim] each.

        page_ids, heads: broadcast to [*lead, pages].
        """

        def tokens(leaf: jax.Array, scales: jax.Array | None, transposed: bool) -> jax.Array:
            found = leaf[page_ids, heads]  # one tile per (page, head), no transpose
            found = found.swapaxes(-1, -2) if transposed else found
            found = dequantize_tokens(found, None if scales is None else scales[page_ids, heads], dtype)
            return found.reshape(*found.shape[:-3], -1, self.head_dim)

        k = tokens(self.k, self.k_scales, False)
        return k, k if self.v is None else tokens(self.v, self.v_scales, self.v_transposed)


def abstract_pages(
    num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: Any, shared: bool = False, **options: Any
) -> KVPages:
    """The shapes of a pool. dtype: a float dtype, int8 or float8_e4m3fn; shared: the keys are the values, too;
    options: to ShapeDtypeStruct (sharding).
    """

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, **options)

    dtype = jnp.dtype(dtype)
    rows = (num_pages, kv_heads, page_size, head_dim)
    if dtype.name not in LARGEST:
        return KVPages(array(rows, dtype), None if shared else array(rows, dtype))
    scales = array(rows[:3], jnp.float32)
    if shared:
        return KVPages(array(rows, dtype), None, scales)
    values = array((num_pages, kv_heads, head_dim, page_size), dtype)
    return KVPages(array(rows, dtype), values, scales, scales, v_transposed=True)


def quantize_tokens(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Each vector of the last dimension as `dtype` times a scale of its own. x: [..., head_dim].

    Returns ([..., head_dim] of dtype, [...] f32). int8 rounds to nearest, ties to even.
    """
    dtype = jnp.dtype(dtype)
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / LARGEST[dtype.name]
    # A vector of zeros has scale 0: any divisor will do.
    stored = wide / jnp.where(scales == 0.0, 1.0, scales)[..., None]
    return (jnp.round(stored) if dtype == jnp.int8 else stored).astype(dtype), scales


def dequantize_tokens(stored: jax.Array, scales: jax.Array | None, dtype: Any) -> jax.Array:
    """Vectors as they were before `quantize_tokens`, about. stored: [..., head_dim]; scales: [...], or None."""
    if scales is None:
        return stored.astype(dtype)
    return (stored.astype(jnp.float32) * scales[..., None]).astype(dtype)
