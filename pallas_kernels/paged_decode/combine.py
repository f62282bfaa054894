"""Rows that several blocks shared: their parts are merged and written into the attention kernel's output."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import interpreted
from pallas_kernels.paged_decode.config import round_up
from pallas_kernels.paged_decode.plan import SLOTS, Plan

F32 = jnp.float32
LOG2E = math.log2(math.e)
THREADS = 128


def merge(
    out: jax.Array, parts: jax.Array, stats: jax.Array, plan: Plan, sinks: jax.Array | None, *, interpret: Any
) -> jax.Array:
    """out: [batch, kv_heads, queries * q_per_kv, head_dim], in place; parts: [slots, columns, padded head_dim] f32,
    unnormalised; stats: [slots, 2, columns] f32, maximum in log2 and sum of weights; sinks: [kv_heads, q_per_kv] f32.
    """
    config = plan.config
    dim = out.shape[-1]
    padded = round_up(parts.shape[-1], THREADS)
    unroll = parts_at_once(config.blocks, plan.merges.shape[0])

    def kernel(*refs: Any) -> None:
        parts_g, stats_g, merges_g, *rest, out_g, out_s = refs
        if interpret is None:  # launched while the attention kernel ends: the plan may be read, its parts not yet
            plgpu.griddepcontrol_wait()
        i, row = lax.axis_index("merge"), lax.axis_index("row")
        sequence, head_tile, count, slot, block = (merges_g[i, c] for c in range(5))

        @pl.when(count > 1)
        def _() -> None:
            flat = plgpu.Layout.WG_STRIDED((padded,), vec_size=1)

            def step(j: jax.Array, carry: tuple) -> tuple:
                # Loads are independent of each other, so that they are in flight together.
                found = []
                for u in range(unroll):
                    part = jnp.minimum(j * unroll + u, count - 1)
                    at = jnp.where(part == 0, slot, SLOTS * (block + part - 1))
                    top = jnp.where(j * unroll + u < count, stats_g[at, 0, row], -jnp.inf)
                    acc = plgpu.load(parts_g.at[at, row], layout=flat)
                    found.append((top, stats_g[at, 1, row], acc))
                top, weight, acc = carry
                new_top = functools.reduce(jnp.maximum, [x for x, _, _ in found], top)
                old = jnp.exp2(top - new_top)
                shares = [jnp.exp2(x - new_top) for x, _, _ in found]
                weight = sum((s * w for s, (_, w, _) in zip(shares, found, strict=True)), weight * old)
                acc = sum((x * s for s, (_, _, x) in zip(shares, found, strict=True)), acc * old)
                return new_top, weight, acc

            start = (jnp.float32(-1e30), jnp.float32(0), plgpu.layout_cast(jnp.zeros((padded,), F32), flat))
            steps = lax.div(count + unroll - 1, jnp.int32(unroll))
            top, weight, acc = lax.fori_loop(0, steps, step, start)
            head, vector = head_tile, row
            if config.row_tiles > 1:
                head = lax.div(head_tile, jnp.int32(config.row_tiles))
                vector = row + lax.rem(head_tile, jnp.int32(config.row_tiles)) * config.columns
            if sinks is not None:
                sink = rest[0][head, lax.rem(vector, jnp.int32(config.q_per_kv))]
                weight = weight + jnp.exp2(sink * LOG2E - top)
            out_s[...] = (acc * (1 / jnp.maximum(weight, 1e-30))).astype(out.dtype)
            plgpu.commit_smem()

            @pl.when(vector < config.rows)
            def _() -> None:
                plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, dim)], out_g.at[sequence, head, vector])
                plgpu.wait_smem_to_gmem(0)

    inputs = [parts, stats, plan.merges] + ([] if sinks is None else [sinks])
    merged = jax.new_ref(out)
    plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=[plgpu.SMEM((padded,), out.dtype)],
        grid=(plan.merges.shape[0], min(config.rows, config.columns)),
        grid_names=("merge", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **interpreted(interpret),
    )(*inputs, merged)
    return merged[...]


def parts_at_once(blocks: int, rows: int) -> int:
    """Parts loaded together: about as many as a row has."""
    return min(16, max(4, blocks // max(1, rows) + 2))
