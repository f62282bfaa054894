"""Products of the matrix unit. The interpreter lacks operands in registers and reshaped memory: there, plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill.config import ROWS
from pallas_kernels.paged_prefill.shapes import Shapes


def scores(shapes: Shapes, queries: Any, group: jax.Array, ring: Any, slot: jax.Array) -> jax.Array:
    """A warpgroup's queries times the keys in a slot of their ring, [ROWS, keys] f32."""
    if shapes.interpreted:
        q = [queries[slab, group].reshape(ROWS, shapes.slab) for slab in range(shapes.slabs)]
        return dot(jnp.concatenate(q, axis=1), read(ring.at[slot]).T)

    def multiply(out: Any) -> jax.Array:
        issue_scores(shapes, out, queries, group, ring, slot)
        return out[...]

    return pl.run_scoped(multiply, scores_memory(shapes))


def add_product(shapes: Shapes, out: jax.Array, weights: jax.Array, ring: Any, slot: jax.Array) -> jax.Array:
    """out + weights @ the values in a slot of their ring. out: [ROWS, head_dim] f32; weights: [ROWS, keys]."""
    if shapes.interpreted:
        for part, values in pieces(shapes, weights, ring, slot):
            x = read(values)
            out += dot(part, x.T if shapes.quantized else x)
        return out

    def multiply(ref: Any) -> None:
        issue_product(shapes, ref, weights, ring, slot)

    return pl.run_state(multiply)(plgpu.ACC.init(out))


def scores_and_product[T](
    shapes: Shapes,
    memory: Any,
    group: jax.Array,
    slot: jax.Array,
    before: jax.Array,
    out: jax.Array,
    weights: jax.Array,
    meanwhile: Callable[[jax.Array], T],
) -> tuple[jax.Array, T]:
    """add_product of slot `before`, and `meanwhile(scores(...))` of `slot`, which runs during it. Waits for the values.

    The registers of `weights` are in use until this returns.
    """
    if shapes.interpreted:
        s = scores(shapes, memory["q"], group, memory["k"], slot)
        plgpu.barrier_wait(memory["v_full"].at[before])
        return add_product(shapes, out, weights, memory["v"], before), meanwhile(s)

    abstract = jax.eval_shape(meanwhile, jax.ShapeDtypeStruct((ROWS, shapes.config.keys), jnp.float32))
    leaves, tree = jax.tree.flatten(abstract)

    def multiply(refs: Any) -> None:
        out_ref, *results = refs

        def both(s_ref: Any) -> None:
            issue_scores(shapes, s_ref, memory["q"], group, memory["k"], slot)
            plgpu.barrier_wait(memory["v_full"].at[before])
            issued = issue_product(shapes, out_ref, weights, memory["v"], before)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=issued)
            for ref, x in zip(results, jax.tree.leaves(meanwhile(s)), strict=True):
                ref[...] = x

        pl.run_scoped(both, scores_memory(shapes))

    out, *results = pl.run_state(multiply)((plgpu.ACC.init(out), *map(zeros, leaves)))
    return out, jax.tree.unflatten(tree, results)


def scores_memory(shapes: Shapes) -> Any:
    return plgpu.ACC((ROWS, shapes.config.keys), jnp.float32)


def issue_scores(shapes: Shapes, out: Any, queries: Any, group: jax.Array, ring: Any, slot: jax.Array) -> None:
    """Start the products of `scores`."""
    for slab in range(shapes.slabs):
        keys = ring.at[slot, :, shapes.columns(slab)]
        plgpu.wgmma(out, shapes.rows(queries).at[slab, group], keys.transpose((1, 0)))


def issue_product(shapes: Shapes, out: Any, weights: jax.Array, ring: Any, slot: jax.Array) -> int:
    """Start the products of `add_product`; returns how many."""
    parts = pieces(shapes, weights, ring, slot)
    for part, values in parts:
        plgpu.wgmma(out, part, values.transpose((1, 0)) if shapes.quantized else values)
    return len(parts)


def pieces(shapes: Shapes, weights: jax.Array, ring: Any, slot: jax.Array) -> list[tuple[jax.Array, Any]]:
    """Weights, and the values they are of, that lie together in memory."""
    values = shapes.values(ring, slot)
    size = shapes.config.keys // len(values)
    return [(weights[:, n * size : (n + 1) * size], part) for n, part in enumerate(values)]


def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    """In the layout of an accumulator, or of its row sums."""
    layout = plgpu.Layout.WGMMA if len(x.shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.zeros(x.shape, x.dtype), layout)


def read(ref: Any) -> jax.Array:
    """As the matrix unit would: in the order of the copies that fill this memory."""
    x = ref[...]
    plgpu.commit_smem()
    return x


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot(x, y, preferred_element_type=jnp.float32)
