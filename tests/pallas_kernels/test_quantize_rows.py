"""quantize_rows, alone and behind a norm: every implementation stores what the reference does."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import LARGEST, ROW_DTYPES
from pallas_kernels.quantize_rows import norm_and_quantize_rows, quantize_rows, reference
from pallas_kernels.rms_norm import reference as norms
from pallas_kernels.target import CPU, H200
from tests.pallas_kernels.interpreter import interpreter
from tests.pallas_kernels.paged_cases import normal

SIZES = (1.0, 100.0, 0.0, 1e-3)
"""Of the rows; one is empty."""
FORMATS = ["int8", "fp8"]


def wide(x):
    return np.array(x.astype(jnp.float32))


def make(width, dtype):
    rng = np.random.default_rng(width)
    x, delta = (jnp.array(normal(rng, 4, width) * np.array(SIZES)[:, None], dtype) for _ in range(2))
    return x, delta, jnp.array(1 + 0.3 * normal(rng, width), dtype)


def assert_stored(got, want, format):
    """want: f32, not rounded. Beside a step's middle either neighbour is right: so near it that arithmetic counts."""
    values, scales = reference.quantize_rows(want, np.dtype(ROW_DTYPES[format]))
    assert got.values.dtype == ROW_DTYPES[format]
    assert got.scales.dtype == jnp.float32
    np.testing.assert_allclose(got.scales, scales, rtol=2e-6)
    stored, wanted = wide(got.values), values.astype(np.float32)
    np.testing.assert_array_equal(np.abs(stored).max(1), [LARGEST[format] * bool(row.any()) for row in want])
    step = 1.0 if format == "int8" else np.maximum(np.abs(wanted) / 8, 2.0**-9)
    assert (np.abs(stored - wanted) <= step * 1.001).all()
    assert (stored != wanted).mean() < 1e-3


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("implementation", "width", "dtype"),
    [("xla", 70, "float32"), ("xla", 1024, "bfloat16"), ("mosaic", 1792, "bfloat16"), ("mosaic", 2048, "float16")],
)
def test_equals_the_reference(implementation, width, dtype, format):
    x, delta, scale = make(width, dtype)
    with interpreter() if implementation == "mosaic" else contextlib.nullcontext() as interpret:
        options = {"format": format, "target": H200, "implementation": implementation, "interpret": interpret}
        alone = quantize_rows(x, **options)
        same, normed = norm_and_quantize_rows(x, None, scale, eps=1e-6, **options)
        total, summed = norm_and_quantize_rows(x, delta, scale, eps=1e-6, **options)
        jax.block_until_ready((alone, normed, summed))
    assert alone.dtype == summed.dtype == dtype
    assert_stored(alone, wide(x), format)
    np.testing.assert_array_equal(wide(same), wide(x))
    np.testing.assert_array_equal(wide(total), wide((wide(x) + wide(delta)).astype(x.dtype)))
    assert_stored(normed, norms.rms_norm(wide(x), wide(scale), eps=1e-6), format)
    assert_stored(summed, norms.rms_norm(wide(total), wide(scale), eps=1e-6), format)


def test_refusals():
    x = jnp.ones((2, 1000), jnp.bfloat16)
    with pytest.raises(ValueError, match="format is 'int4'; rows are quantized to int8 or fp8"):
        quantize_rows(x, "int4")
    message = "a row has 1000 elements; it takes multiples of 256 up to 16384"
    with pytest.raises(ValueError, match=message):
        quantize_rows(x, "int8", target=H200, implementation="mosaic")
    with pytest.raises(ValueError, match=r"compute capability 9.0 or more, and this is a CPU"):
        quantize_rows(x[:, :512], "int8", target=CPU, implementation="mosaic")
    with pytest.raises(ValueError, match=r"scale has shape \(7,\); it must be \[1000\]"):
        norm_and_quantize_rows(x, x, jnp.ones(7), eps=1e-6, format="int8")
    with pytest.raises(ValueError, match="x is bfloat16 and delta float32; norm_and_quantize_rows takes one dtype"):
        norm_and_quantize_rows(x, jnp.ones((2, 1000)), jnp.ones(1000), eps=1e-6, format="int8")
