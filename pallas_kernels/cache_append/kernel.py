"""cache_append as one Mosaic GPU kernel that writes into the pages it is given.

A block of 128 threads takes one token and some of its kv heads: it loads their queries, key and value straight into
registers, normalises, rotates and quantizes them there, and stores them. Blocks share nothing and wait for nothing, so
what a launch costs is little more than one trip to memory and back. Long prompts leave values that are stored with
their tokens innermost to blocks of their own, which take tokens side by side.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_append.block import Block
from pallas_kernels.cache_append.config import Config
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mosaic import interpreted


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
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, KVPages]:
    """Shapes as in `api.cache_append`; pairs of dimensions are halves."""
    tokens, kv_heads, heads, head_dim = qkv.shape
    if not tokens:
        return qkv[:, :, :-2], pages
    optional = {"cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm}
    inputs = {"qkv": qkv, "columns": qkv[..., None], "page_ids": page_ids, "offsets": offsets}
    inputs |= {name: array for name, array in optional.items() if array is not None}
    leaves = {name: getattr(pages, name) for name in ("k", "v", "k_scales", "v_scales")}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    # A last dimension of one: copies to and from registers step through it, whatever the step of those before.
    columns = [name for name in leaves if pages.v_transposed and name.startswith("v")]
    pools = {name: jax.new_ref(leaf[..., None] if name in columns else leaf) for name, leaf in leaves.items()}
    block = Block(
        tokens=tokens,
        heads=config.heads_per_block,
        q_per_kv=heads - 2,
        head_dim=head_dim,
        pairs=0 if cos is None else cos.shape[1],
        norm_eps=norm_eps,
        itemsize=qkv.dtype.itemsize,
        num_pages=pages.num_pages,
        stored=pages.dtype,
        v_transposed=pages.v_transposed,
        values_apart=config.values_apart and pages.v_transposed,
    )
    groups = -(-tokens // block.group) * kv_heads if block.values_apart else 0
    parts = kv_heads // config.heads_per_block

    def body(*refs: Any) -> None:
        named = dict(zip([*inputs, *pools, "q"], refs, strict=True))
        # Groups of values come first: one that is not in a row takes longest.
        index = lax.axis_index("block")
        if groups:
            pl.when(index < groups)(lambda: block.write_values(named, index // kv_heads, index % kv_heads))
        rest = index - groups
        pl.when(rest >= 0)(lambda: block.append(named, rest // parts, rest % parts))

    q = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, kv_heads, heads - 2, head_dim), qkv.dtype),
        grid=(groups + tokens * parts,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="cache_append",
        **interpreted(interpret),
    )(*inputs.values(), *pools.values())
    new: Any = {name: jax.freeze(pool).reshape(leaves[name].shape) for name, pool in pools.items()}
    return q, dataclasses.replace(pages, **new)
