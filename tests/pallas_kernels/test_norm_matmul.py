"""A norm and the projection behind it in one kernel: to the bit what the two kernels compute one after the other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice
from pallas_kernels.formats import quantize
from pallas_kernels.fused_mlp import down, gate_up
from pallas_kernels.fused_mlp import reference as mlp_reference
from pallas_kernels.norm_matmul import Norm, norm_gate_up, norm_projection, reference
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.target import H200
from tests.pallas_kernels.interpreter import interpreter

FEW_CORES = dataclasses.replace(H200, cores=2, untimed=True)
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
        (None, 1, (2, 128), True, jnp.bfloat16),
        (None, 8, (128,), False, jnp.float32),
        ("int8", 3, (2, 64), True, jnp.float32),
        ("fp8", 8, (64,), True, jnp.bfloat16),
        ("int4", 1, (64,), True, jnp.bfloat16),
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
        deltas = norm.delta if delta else zeros
        added, inner = jax.block_until_ready(add_rms_norm(x, deltas, norm.scale, eps=EPS, **options))
        one = quant_matmul if format and alone is down else alone
        two = wide(one(inner, weight, **options))
    np.testing.assert_array_equal(total, wide(added))
    np.testing.assert_array_equal(out, two)
    project = mlp_reference.gate_up if alone is gate_up else mlp_reference.product
    sums, want = reference.normed(x, norm, lambda inner: project(inner, weight, None))
    np.testing.assert_allclose(total, sums, rtol=2**-8, atol=0)
    np.testing.assert_allclose(out, want, rtol=0, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("format", [None, "int8"])
def test_plain_jax_adds_normalises_and_multiplies(format):
    """With biases, more rows and odd sizes."""
    x, delta = normal(0, (13, 96), 3.0, jnp.float32), normal(1, (13, 96), 3.0, jnp.float32)
    norm = Norm(normal(2, (96,), dtype=jnp.float32), delta, EPS)
    weight, bias = normal(3, (96, 2, 40), 0.1, jnp.float32), normal(4, (2, 40), dtype=jnp.float32)
    weight = weight if format is None else quantize(weight, format)
    for op, project in ((norm_gate_up, mlp_reference.gate_up), (norm_projection, mlp_reference.product)):
        total, out = op(x, norm, weight, bias)
        sums, want = reference.normed(x, norm, lambda inner, project=project: project(inner, weight, bias))
        np.testing.assert_array_equal(total, sums)
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-5 * np.abs(want).max())


SHAPES = {"rows": 1, "inputs": 4096, "outputs": (6144,), "format": None, "target": {"untimed": True}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"outputs": (2, 14336)}, None),
        ({"format": "int8"}, None),
        ({"format": "int4", "outputs": (2, 14336), "rows": 8}, None),
        ({"target": {}}, "it was not timed yet"),
        ({"rows": 9}, "it takes up to 8 rows, of which every block reads all first, not 9"),
        ({"inputs": 4160}, "a row has 4160 elements; it takes multiples of 1024 up to 16384"),
        (
            {"outputs": (2, 256)},
            "it is known to be faster where its blocks occupy 80% to 100% of 132 cores once, not 2",
        ),
        ({"format": "int4", "group_size": 32}, "it takes groups of 64 inputs and more, not 32"),
        ({"format": "int8", "rounded": True}, "it multiplies activations of 16 bits, and this weight has them rounded"),
    ],
)
def test_where_it_runs_and_why_not_elsewhere(change, reason):
    case = SHAPES | change
    x = jax.ShapeDtypeStruct((case["rows"], case["inputs"]), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((case["inputs"],), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((case["inputs"], *case["outputs"]), jnp.bfloat16)
    if case["format"] is not None:
        sizes = {name: case[name] for name in ("group_size",) if name in case}
        weight = jax.eval_shape(functools.partial(quantize, format=case["format"], **sizes), weight)
        weight = dataclasses.replace(weight, round_activations="rounded" in case)
    op = norm_gate_up if len(case["outputs"]) == 2 else norm_projection
    target = dataclasses.replace(H200, **case["target"])

    def run(x, delta, scale, weight):
        return op(x, Norm(scale, delta, EPS), weight, target=target)

    with choice.recorded() as made:
        total, out = jax.eval_shape(run, x, x, scale, weight)
    assert (total.shape, out.shape) == (x.shape, (x.shape[0], case["outputs"][-1]))
    assert made[0].op == op.__name__
    assert made[0].implementation == ("mosaic" if reason is None else "xla")
    assert (made[0].obstacle or "").startswith(reason or "")
    assert (made[0].obstacle is None) == (reason is None)


def test_what_it_refuses():
    x, weight, scale = jnp.zeros((2, 64)), jnp.zeros((64, 128)), jnp.ones(64)
    with pytest.raises(ValueError, match=r"norm.delta has shape \(2, 32\); it must be \[2, 64\]"):
        norm_projection(x, Norm(scale, x[:, :32], EPS), weight)
    with pytest.raises(ValueError, match=r"x is float32 and norm.delta float16; a norm takes one dtype"):
        norm_projection(x, Norm(scale, x.astype(jnp.float16), EPS), weight)
    with pytest.raises(ValueError, match=r"norm.scale has shape \(64,\); it must be \[128\]"):
        norm_gate_up(jnp.zeros((2, 128)), Norm(scale, None, EPS), jnp.zeros((128, 2, 64)))
    with pytest.raises(ValueError, match=r"bias has shape \(64,\); it must be \[128\]"):
        norm_projection(x, Norm(scale, None, EPS), weight, scale)
    with pytest.raises(ValueError, match="the kernel of norm_projection cannot run: it is written for Hopper"):
        norm_projection(x, Norm(scale, None, EPS), weight, implementation="mosaic")
