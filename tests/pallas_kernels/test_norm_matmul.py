"""A norm and the projection behind it in one kernel: to the bit what the two kernels compute one after the other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import quantize
from pallas_kernels.fused_mlp import down, gate_up
from pallas_kernels.fused_mlp import reference as mlp_reference
from pallas_kernels.norm_matmul import Norm, norm_gate_up, norm_projection, reference
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.target import H200
from tests.pallas_kernels.interpreter import interpreter

FEW_CORES = dataclasses.replace(H200, cores=2)
EPS = 1e-5


def normal(seed: int, shape: tuple[int, ...], size: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
    return (size * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def weight_of(format: str | None, shape: tuple[int, ...]) -> Any:
    weight = normal(1, shape, 0.05)
    return weight if format is None else jax.jit(functools.partial(quantize, format=format))(weight)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


@pytest.mark.parametrize(
    ("format", "rows", "outputs", "delta", "scale_dtype"),
    [
        (None, 1, (2, 192), True, jnp.bfloat16),
        (None, 8, (128,), False, jnp.float32),
        ("int8", 3, (2, 64), True, jnp.float32),
        ("int8", 1, (320,), True, jnp.bfloat16),
        ("fp8", 8, (64,), True, jnp.bfloat16),
        ("int4", 3, (64,), True, jnp.bfloat16),
    ],
)
def test_equals_both_kernels_and_the_reference(format, rows, outputs, delta, scale_dtype):
    x, weight = normal(0, (rows, 1024), 3.0), weight_of(format, (1024, *outputs))
    norm = Norm(normal(2, (1024,), dtype=scale_dtype), normal(3, x.shape) if delta else None, EPS)
    folded, alone = (norm_gate_up, gate_up) if len(outputs) == 2 else (norm_projection, down)
    with interpreter() as interpret:
        options = {"target": FEW_CORES, "implementation": "mosaic", "interpret": interpret}
        total, out = (wide(array) for array in folded(x, norm, weight, **options))
        zeros = jnp.zeros_like(x)
        added, inner = add_rms_norm(x, norm.delta if delta else zeros, norm.scale, eps=EPS, **options)
        one = quant_matmul if format and alone is down else alone
        two = wide(one(inner, weight, **options))
    np.testing.assert_array_equal(total, wide(added))
    np.testing.assert_array_equal(out, two)
    project = mlp_reference.gate_up if alone is gate_up else mlp_reference.product
    sums, want = reference.normed(x, norm, lambda inner: project(inner, weight, None))
    np.testing.assert_allclose(total, sums, rtol=2**-8, atol=0)
    np.testing.assert_allclose(out, want, rtol=0, atol=0.02 * np.abs(want).max())
