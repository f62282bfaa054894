"""KVPages: shapes of a pool, tokens in 8 bits and back, and pools whose leaves do not belong together."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_pages import abstract_pages, dequantize_tokens, quantize_tokens
from tests.pallas_kernels.paged_cases import fill, normal

FP8 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_a_pool_of_floats(dtype):
    pages = abstract_pages(7, 2, 16, 64, dtype)
    assert pages.k.shape == pages.v.shape == (7, 2, 16, 64)
    assert (pages.num_pages, pages.kv_heads, pages.page_size, pages.head_dim) == (7, 2, 16, 64)
    assert pages.dtype == pages.v.dtype == dtype
    assert not pages.quantized
    assert not pages.v_transposed
    assert len(jax.tree.leaves(pages)) == 2


@pytest.mark.parametrize("dtype", [np.int8, FP8])
def test_a_pool_of_8_bits_has_scales_and_values_transposed(dtype):
    pages = abstract_pages(7, 2, 16, 64, dtype)
    assert pages.k.shape == (7, 2, 16, 64)
    assert pages.v.shape == (7, 2, 64, 16)
    assert pages.v_transposed
    assert pages.k_scales.shape == pages.v_scales.shape == (7, 2, 16)
    assert pages.k_scales.dtype == pages.v_scales.dtype == np.float32
    assert (pages.num_pages, pages.kv_heads, pages.page_size, pages.head_dim) == (7, 2, 16, 64)
    assert pages.quantized


# Half a step of int8 is 1 / 254 of the largest; fp8 has 3 bits of mantissa, and steps of 2 ** -9 below 2 ** -6.
@pytest.mark.parametrize(("dtype", "relative", "of_largest"), [(np.int8, 0, 0.5 / 127), (FP8, 2**-4, 2**-10 / 448)])
def test_tokens_come_back_within_half_a_step(dtype, relative, of_largest):
    x = normal(np.random.default_rng(0), 5, 3, 64) * np.float32([[[0.01]], [[1]], [[30]], [[1e-6]], [[1e4]]])
    stored, scales = quantize_tokens(x, dtype)
    assert (stored.dtype, scales.dtype, scales.shape) == (dtype, np.float32, (5, 3))
    largest = np.abs(x).max(-1, keepdims=True)
    assert np.abs(np.asarray(stored, np.float32)).max(-1) == pytest.approx(127 if dtype == np.int8 else 448)
    error = np.abs(dequantize_tokens(stored, scales, np.float32) - x)
    assert (error <= 1.0001 * np.maximum(relative * np.abs(x), of_largest * largest)).all()
    assert error.max() > 0


def test_int8_rounds_ties_to_even():
    stored, scales = quantize_tokens(np.float32([127, 0.5, 1.5, 2.5, -0.5, -1.5, 2.4999]), np.int8)
    assert scales == 1
    np.testing.assert_array_equal(stored, [127, 0, 2, 2, 0, -2, 2])


@pytest.mark.parametrize("dtype", [np.int8, FP8])
def test_zeros_come_back_as_zeros(dtype):
    stored, scales = quantize_tokens(np.zeros((2, 8), jnp.bfloat16), dtype)
    assert not np.asarray(scales).any()
    np.testing.assert_array_equal(dequantize_tokens(stored, scales, np.float32), np.zeros((2, 8)))


def test_tokens_without_scales_are_only_cast():
    x = jnp.asarray([1.5, np.nan], jnp.bfloat16)
    np.testing.assert_array_equal(dequantize_tokens(x, None, np.float32), np.float32([1.5, np.nan]))


@pytest.mark.parametrize("dtype", [np.int8, FP8, np.float32])
def test_gather_reads_whole_pages_of_each_head(dtype):
    rng = np.random.default_rng(0)
    pages = fill(abstract_pages(5, 2, 4, 8, dtype), 0.0)
    k, v = normal(rng, 5, 2, 4, 8), normal(rng, 5, 2, 4, 8)
    if dtype == np.float32:
        pages, tolerance = replace(pages, k=k, v=v), 0.0
    else:
        (k8, k_scales), (v8, v_scales) = quantize_tokens(k, dtype), quantize_tokens(v, dtype)
        pages = replace(pages, k=k8, v=v8.swapaxes(2, 3), k_scales=k_scales, v_scales=v_scales)
        tolerance = 0.01 if dtype == np.int8 else 0.07
    pages = jax.tree.map(jnp.asarray, pages)
    ids = np.asarray([[3, 0, 4], [1, 1, 2]])
    got_k, got_v = pages.gather(ids, np.asarray([[1], [0]]), np.float32)
    for got, want in ((got_k, k), (got_v, v)):
        for row, head in enumerate((1, 0)):
            expected = np.concatenate([want[page, head] for page in ids[row]])
            np.testing.assert_allclose(got[row], expected, rtol=tolerance, atol=4 * tolerance)


WRONG = [
    (np.float32, {"v": (7, 2, 8, 16)}, r"v has shape \(7, 2, 8, 16\); it must be \[7, 2, 16, 8\]"),
    (np.int8, {"v": (7, 2, 16, 8)}, r"v has shape \(7, 2, 16, 8\); it must be \[7, 2, 8, 16\]"),
    (np.int8, {"k_scales": (7, 2)}, r"k_scales has shape \(7, 2\); it must be \[7, 2, 16\]"),
    (np.int8, {"v_scales": None}, "scales of keys or of values only; an 8-bit cache needs both"),
    (np.int8, {"k_scales": None, "v_scales": None}, "pages of int8 without scales; 8 bits need them"),
    (np.float32, {"k_scales": (7, 2, 16), "v_scales": (7, 2, 16)}, "pages of float32 with scales; 8 bits need them"),
]


@pytest.mark.parametrize(("dtype", "leaves", "message"), WRONG)
def test_leaves_that_disagree_are_refused(dtype, leaves, message):
    pages = fill(abstract_pages(7, 2, 16, 8, dtype), 0.0)
    pages.check()
    wrong = {name: None if shape is None else np.zeros(shape, np.float32) for name, shape in leaves.items()}
    with pytest.raises(ValueError, match=message):
        replace(pages, **wrong).check()
