"""paged_prefill for Hopper: one warpgroup loads, two compute, after FlashAttention-3 (Shah et al. 2024).

A tile is up to 128 query rows of one kv head: some tokens, and those of its query heads that share loads. Each consumer
warpgroup takes half of a tile's rows through all its keys, a step of 64 or 128 at a time; the softmax of a step runs
during the product of the step before with its values. A block stays on its core and works through tiles of falling
length, so that a tile's first loads and its predecessor's last products overlap. Pages come by the copy engine, a page
a copy; those of an 8-bit cache are widened by the loading warpgroup.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mosaic import interpreted
from pallas_kernels.paged_prefill.attend import consume
from pallas_kernels.paged_prefill.config import CONSUMERS, Config
from pallas_kernels.paged_prefill.loads import produce
from pallas_kernels.paged_prefill.plan import Plan
from pallas_kernels.paged_prefill.shapes import Shapes


def paged_prefill(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    plan: Plan,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    config: Config,
    cores: int,
    interpret: Any = None,
) -> jax.Array:
    """Shapes as in `api.paged_prefill`; plan: of `config.tile_tokens`; cores: of the GPU."""
    tokens, kv_heads, q_per_kv, head_dim = q.shape
    most = plan.tiles.shape[0] * kv_heads * q_per_kv // config.heads
    shapes = Shapes(
        config=config,
        tokens=tokens,
        kv_heads=kv_heads,
        q_per_kv=q_per_kv,
        head_dim=head_dim,
        page_size=pages.page_size,
        dtype=q.dtype,
        cache_dtype=pages.dtype,
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        blocks=min(cores * config.blocks_per_core or most, most),
        interpreted=interpret is not None,
    )
    q = q.reshape(tokens, kv_heads * q_per_kv, head_dim)
    if shapes.interpreted or tokens < config.rows_tokens:
        # The copy engine reads past the end of an array, but no more than the array is long; the interpreter does not.
        q = jnp.pad(q, ((0, config.tile_tokens), (0, 0), (0, 0)))
    inputs: dict[str, Any] = {
        "q": q,
        "k": pages.k,
        "v": pages.v,
        "table": block_tables,
        "tiles": plan.tiles,
        "count": plan.count,
    }
    if pages.quantized:
        inputs |= {"k_scales": pages.k_scales, "v_scales": pages.v_scales}
    if sinks is not None:
        inputs["sinks"] = sinks.reshape(-1).astype(jnp.float32)

    def kernel(*refs: Any) -> None:
        *given, out, memory = refs
        named = dict(zip(inputs, given, strict=True)) | {"out": out}
        group = lax.axis_index("warpgroup")

        @pl.when(group < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(config.consumer_registers, action="increase")
            consume(shapes, named, memory, group)

        @pl.when(group == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(config.producer_registers, action="decrease")
            produce(shapes, named, memory)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tokens, kv_heads * q_per_kv, head_dim), q.dtype),
        grid=(shapes.blocks,),
        kernel_name="paged_prefill",
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[shapes.scratch()],
        # Sums along rows stay within a warp: the memory for others is as small as it gets.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        **interpreted(interpret),
    )(*inputs.values())
    return out.reshape(tokens, kv_heads, q_per_kv, head_dim)
