"""The kernel of paged_prefill, compiled for GPUs that are not here, at the sizes of real models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_pages import abstract_pages
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.target import H200
from scripts.aot import compile_for_gpu

# tokens, batch, kv_heads, q_per_kv, head_dim, page_size, cache, options, GPU
SHAPES = {
    "llama-3-8b": (8192, 8, 8, 4, 128, 64, jnp.bfloat16, {}, "h200"),
    "llama-3-8b int8": (2048, 64, 8, 4, 128, 64, jnp.int8, {}, "h100"),
    "gemma-2-9b": (2048, 4, 8, 2, 256, 64, jnp.bfloat16, {"window": 4096, "soft_cap": 50.0}, "h200"),
    "gpt-oss-20b fp8": (512, 16, 8, 8, 64, 32, jnp.float8_e4m3fn, {"window": 128, "sinks": True}, "h200"),
    "bert-base": (2048, 64, 12, 1, 64, 64, jnp.bfloat16, {"causal": False}, "h200"),
    "pages of 16 int8": (512, 16, 8, 4, 128, 16, jnp.int8, {}, "h200"),
    "head_dim 80": (16, 16, 32, 1, 80, 128, jnp.bfloat16, {}, "h200"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_compiles(name):
    """One kernel with no spills in its registers, and temporaries of the plan, and of very few queries, alone."""
    tokens, batch, kv_heads, q_per_kv, head_dim, page_size, cache, options, gpu = SHAPES[name]
    array, options = jax.ShapeDtypeStruct, dict(options)
    sinks = array((kv_heads, q_per_kv), jnp.float32) if options.pop("sinks", False) else None
    ids = [array(shape, jnp.int32) for shape in ((batch, 512), (batch + 1,), (batch,))]

    def attend(q, pages, tables, query_start, lengths, sinks):
        options["sinks"] = sinks
        return paged_prefill(
            q, pages, tables, query_start, lengths, scale=0.1, **options, target=H200, implementation="mosaic"
        )

    q = array((tokens, kv_heads, q_per_kv, head_dim), jnp.bfloat16)
    pages = abstract_pages(1000, kv_heads, page_size, head_dim, cache)
    compiled, kernels = compile_for_gpu(attend, q, pages, *ids, sinks, gpu=gpu)
    assert len(kernels) == 1
    # Of 256 dimensions a thread keeps 128 sums: some of the rest spill.
    assert kernels[0].spilled_bytes <= (400 if head_dim == 256 else 0)
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
