"""Caches with shuffled pages, NaN wherever no token was written: what reads a slot it should not, shows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.kv_pages import KVPages, quantize_tokens

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Sizes that key an executable."""

    head_dim: int
    kv_heads: int
    q_per_kv: int
    page_size: int
    width: int
    """Pages of a block table."""
    window: int | None = None

    @property
    def capacity(self) -> int:
        """Longest sequence in tokens."""
        return self.width * self.page_size

    @property
    def scale(self) -> float:
        """Not head_dim ** -0.5, so that a scale the code makes up itself shows."""
        return 0.7 * self.head_dim**-0.5


@dataclass(frozen=True)
class Cache:
    """k, v: [pages, kv_heads, page_size, head_dim]; tables: [batch, width] i32; NaN in every slot past a length."""

    k: Array
    v: Array
    tables: NDArray[np.int32]

    def pages(self, dtype: str = "float32", *, v_transposed: bool | None = None) -> KVPages:
        """As stored in `dtype`, numpy leaves. 8 bits: unused slots hold garbage and NaN scales."""
        if dtype not in ("int8", "float8_e4m3fn"):
            return KVPages(self.k.astype(dtype), self.v.astype(dtype))
        with np.errstate(invalid="ignore"):
            (k, k_scales), (v, v_scales) = (map(np.asarray, quantize_tokens(x, dtype)) for x in (self.k, self.v))
        turned = v_transposed is not False
        return KVPages(k, v.swapaxes(-1, -2).copy() if turned else v, k_scales, v_scales, v_transposed=turned)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def make_cache(layout: Layout, lengths: list[int], seed: int) -> Cache:
    """Every sequence on random pages of its own; table entries past its end point at a page of NaN."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // layout.page_size) for length in lengths]
    num_pages = len(lengths) * layout.width + 1  # by shape alone: another pool size is another compile
    order = rng.permutation(num_pages)
    shape = (num_pages, layout.kv_heads, layout.page_size, layout.head_dim)
    k, v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    tables = np.full((len(lengths), layout.width), order[-1], np.int32)
    taken = 0
    for number, (length, pages) in enumerate(zip(lengths, needed, strict=True)):
        tables[number, :pages] = order[taken : taken + pages]
        taken += pages
        for position in range(length):
            page, offset = tables[number, position // layout.page_size], position % layout.page_size
            k[page, :, offset] = normal(rng, layout.kv_heads, layout.head_dim)
            v[page, :, offset] = normal(rng, layout.kv_heads, layout.head_dim)
    assert taken < num_pages
    return Cache(k, v, tables)


def tolerance(dtype: str, terms: int) -> dict[str, float]:
    """float32: rounding grows with the square root of what is summed; bfloat16: inputs have 8 bits."""
    return (
        {"rtol": 2e-6 * terms**0.5, "atol": 1e-6 * terms**0.5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    )


def fill(abstract: KVPages, value: float) -> KVPages:
    """Numpy pages of one value; what int8 cannot hold (NaN) goes into the scales alone."""
    garbage = 0 if np.isnan(value) else value
    return jax.tree.map(
        lambda leaf: np.full(leaf.shape, garbage if leaf.dtype == np.int8 else value, leaf.dtype), abstract
    )
