"""The kernel of cache_append, compiled for GPUs that are not here, at the sizes of real models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cache_append import cache_append
from pallas_kernels.kv_pages import abstract_pages
from pallas_kernels.target import H200
from scripts.aot import compile_for_gpu

# tokens, kv_heads, q_per_kv, head_dim, cache, norm, GPU
SHAPES = {
    "llama-3-8b decode": (128, 8, 4, 128, jnp.bfloat16, False, "h200"),
    "llama-3-8b prefill, int8": (2048, 8, 4, 128, jnp.int8, False, "h200"),
    "qwen3-32b decode, fp8": (256, 8, 8, 128, jnp.float8_e4m3fn, True, "h100"),
    "llama-3-70b on 8 GPUs, int8": (64, 1, 8, 128, jnp.int8, False, "h100"),
    "head_dim 80, many heads": (16, 32, 1, 80, jnp.bfloat16, False, "h200"),
    "head_dim 256, 16 queries": (300, 2, 16, 256, jnp.float8_e4m3fn, True, "h200"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_compiles(name):
    """No spills, pages in place, and four blocks of 128 threads on a multiprocessor."""
    tokens, kv_heads, q_per_kv, head_dim, cache, norm, gpu = SHAPES[name]
    array = jax.ShapeDtypeStruct
    pages = abstract_pages(1000, kv_heads, 64, head_dim, cache)
    angles, ids = array((tokens, head_dim // 2), jnp.float32), array((tokens,), jnp.int32)
    norms = [array((head_dim,), jnp.bfloat16)] * 2 if norm else [None, None]
    qkv = array((tokens, kv_heads, q_per_kv + 2, head_dim), jnp.bfloat16)

    def append(*arrays):
        *arrays, q_norm, k_norm = arrays
        return cache_append(*arrays, q_norm=q_norm, k_norm=k_norm, target=H200)

    compiled, kernels = compile_for_gpu(append, qkv, angles, angles, pages, ids, ids, *norms, gpu=gpu, donate_argnums=3)
    assert len(kernels) == 1
    assert kernels[0].spilled_bytes == 0
    assert kernels[0].registers <= 128
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    assert memory.temp_size_in_bytes < 4096
