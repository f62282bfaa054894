"""Small cases of a norm and the projection behind it in one kernel, for `check_kernels.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import dequantize, quantize
from pallas_kernels.fused_mlp import reference as mlp_reference
from pallas_kernels.norm_matmul import Norm, norm_gate_up, norm_projection
from pallas_kernels.target import H200
from scripts.check import Check
from scripts.kernels.fused_mlp import normal

EPS = 1e-5


def norm_matmuls() -> list[Check]:
    llama, narrow = (4096, 6144), (2048, 320)
    return [
        check(None, 1, *llama),
        check(None, 8, *llama, delta=False),
        check(None, 1, 4096, 2, 14336),
        check(None, 5, *narrow, dtype="float16"),
        check("int8", 1, *llama),
        check("int8", 1, 4096, 2, 14336),
        check("int8", 3, *narrow, delta=False),
        check("fp8", 8, *llama),
        check("fp8", 2, 4096, 2, 1792),
        check("int4", 1, *llama),
        check("int4", 7, 4096, 2, 14336),
    ]


def check(format: Any, rows: int, embed: int, *outputs: int, dtype: str = "bfloat16", delta: bool = True) -> Check:
    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)
        x, more = (3 * jax.random.normal(each, (rows, embed), dtype) for each in keys[:2])
        scale = 1 + 0.2 * jax.random.normal(keys[2], (embed,), dtype)
        weight = normal(keys[3], embed, *outputs, size=embed**-0.5).astype(dtype)
        return x, more, scale, weight if format is None else quantize(weight, format)

    def norm(more: jax.Array, scale: jax.Array) -> Norm:
        return Norm(scale, more if delta else None, EPS)

    op = norm_gate_up if len(outputs) == 2 else norm_projection

    def kernel(x: jax.Array, more: jax.Array, scale: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
        return op(x, norm(more, scale), weight, target=H200, implementation="mosaic")

    def reference(x: jax.Array, more: jax.Array, scale: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
        total = (x + more if delta else x).astype(jnp.float32)
        inner = total * jax.lax.rsqrt(jnp.mean(total * total, -1, keepdims=True) + EPS) * scale.astype(jnp.float32)
        wide = jnp.moveaxis(dequantize(weight, jnp.float32), -1, 0) if format else weight.astype(jnp.float32)
        project = mlp_reference.gate_up if len(outputs) == 2 else functools.partial(mlp_reference.product, bias=None)
        return total, project(inner, wide)

    size = "x".join(map(str, (embed, *outputs)))
    name = f"norm_matmul {format or dtype} {size} rows={rows}{'' if delta else ' without a delta'}"
    return Check(name, inputs, kernel, reference, 1e-2)
