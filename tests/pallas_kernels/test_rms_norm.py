"""rms_norm: every implementation computes what the reference says."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import add_rms_norm, reference, rms_norm
from pallas_kernels.target import CPU, GPUS, H200, Target
from tests.pallas_kernels.interpreter import interpreter
from tests.pallas_kernels.paged_cases import normal


def inputs(rows, embed, size=1.0):
    rng = np.random.default_rng(rows * embed)
    return size * normal(rng, rows, embed), 1 + 0.3 * normal(rng, embed)


def rounded(array, dtype):
    return np.asarray(jnp.asarray(array, dtype), np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "embed"), [(1, 7), (5, 576), (3, 1024)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_xla(rows, embed, size, dtype):
    """Small rows show eps, large ones that squares are summed in float32."""
    x, scale = (jnp.asarray(array, dtype) for array in inputs(rows, embed, size))
    out = rms_norm(x, scale, eps=1e-6)
    assert out.dtype == dtype
    want = reference.rms_norm(np.asarray(x, np.float32), np.asarray(scale, np.float32), eps=1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=1e-5 if dtype == "float32" else 0.01, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "embed", "size"), [(1, 1024, 1e-3), (3, 2048, 1.0), (2, 5120, 50.0)])
def test_kernel(rows, embed, size, dtype):
    x, scale = (jnp.asarray(array, dtype) for array in inputs(rows, embed, size))
    with interpreter() as interpret:
        out = rms_norm(x, scale, eps=1e-6, target=H200, implementation="mosaic", interpret=interpret)
        out.block_until_ready()
    assert out.dtype == dtype
    want = reference.rms_norm(np.asarray(x, np.float32), np.asarray(scale, np.float32), eps=1e-6)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("xla", "float32"), ("xla", "bfloat16"), ("mosaic", "bfloat16"), ("mosaic", "float16")],
)
def test_of_a_sum(implementation, dtype):
    x, scale = inputs(3, 2048)
    x, delta, scale = (jnp.asarray(array, dtype) for array in (x, x[::-1], scale))
    with interpreter() if implementation == "mosaic" else contextlib.nullcontext() as interpret:
        options = {"target": H200, "implementation": implementation, "interpret": interpret}
        total, normed = add_rms_norm(x, delta, scale, eps=1e-6, **options)
        normed.block_until_ready()
    assert total.dtype == normed.dtype == dtype
    wide = rounded(np.asarray(x, np.float32) + np.asarray(delta, np.float32), dtype)
    np.testing.assert_array_equal(np.asarray(total, np.float32), wide)
    _, want = reference.add_rms_norm(wide, 0 * wide, np.asarray(scale, np.float32), eps=1e-6)
    np.testing.assert_allclose(np.asarray(normed, np.float32), want, rtol=1e-5 if dtype == "float32" else 0.01)


@pytest.mark.parametrize(
    ("rows", "embed", "dtype", "target", "message"),
    [
        (2, 1024, "bfloat16", CPU, "it needs an NVIDIA GPU of compute capability 9.0 or more, and this is a CPU"),
        (2, 1024, "bfloat16", GPUS["a100"], "this is compute capability 8.0"),
        (2, 1024, "bfloat16", Target("gpu"), "this is another GPU"),
        (2, 1024, "float32", H200, "x is float32; it takes bfloat16 or float16"),
        (2, 1000, "bfloat16", H200, "a row has 1000 elements; it takes multiples of 1024 up to 16384"),
        (2, 17408, "bfloat16", H200, "a row has 17408 elements; it takes multiples of 1024 up to 16384"),
        (0, 1024, "bfloat16", H200, "there are no rows"),
    ],
)
def test_where_the_kernel_cannot_run(rows, embed, dtype, target, message):
    x, scale = jnp.ones((rows, embed), dtype), jnp.ones(embed, dtype)
    with pytest.raises(ValueError, match=message):
        rms_norm(x, scale, eps=1e-6, target=target, implementation="mosaic")
    assert rms_norm(x, scale, eps=1e-6, target=target).shape == x.shape


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"scale has shape \(7,\); it must be \[8\]"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(7), eps=1e-6)
    with pytest.raises(ValueError, match=r"x has shape \(8,\); it must be \[any, any\]"):
        rms_norm(jnp.ones(8), jnp.ones(8), eps=1e-6)
    with pytest.raises(ValueError, match=r"delta has shape \(3, 8\); it must be \[2, 8\]"):
        add_rms_norm(jnp.ones((2, 8)), jnp.ones((3, 8)), jnp.ones(8), eps=1e-6)
    with pytest.raises(ValueError, match="x is float32 and delta bfloat16; add_rms_norm takes one dtype"):
        add_rms_norm(jnp.ones((2, 8)), jnp.ones((2, 8), jnp.bfloat16), jnp.ones(8), eps=1e-6)
