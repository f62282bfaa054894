"""Products of the matrix unit; in the interpreter, which lacks operands in registers and reshaped memory, plain ones."""

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


def scores(shapes: Shapes, queries: Any, group: jax.Array, keys: Any, issued: Callable[[], None]) -> jax.Array:
    """Queries of a warpgroup times keys, [ROWS, keys] f32. keys: [keys, head_dim] in shared memory; issued: called while
    the matrix unit works."""
    if shapes.interpreted:
        q = jnp.concatenate([queries[slab, group].reshape(ROWS, shapes.slab) for slab in range(shapes.slabs)], axis=1)
        issued()
        return dot(q, read(keys).T)

    def multiply(out: Any) -> jax.Array:
        for slab in range(shapes.slabs):
            q = shapes.rows(queries).at[slab, group]
            plgpu.wgmma(out, q, keys.at[:, shapes.columns(slab)].transpose((1, 0)))
        issued()
        return out[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, shapes.config.keys), jnp.float32))


def add_product(shapes: Shapes, out: jax.Array, weights: jax.Array, values: Any) -> jax.Array:
    """out + weights @ values. out: [ROWS, head_dim] f32; values: [keys, head_dim] in shared memory."""
    if shapes.interpreted:
        return out + dot(weights, read(values))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(plgpu.ACC.init(out))


def read(ref: Any) -> jax.Array:
    """As the matrix unit would: in the order of the copies that fill this memory."""
    x = ref[...]
    plgpu.commit_smem()
    return x


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot(x, y, preferred_element_type=jnp.float32)
