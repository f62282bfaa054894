"""Weights in 8 and 4 bits: packed and unpacked without loss, quantized to within half a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import GROUP_SIZES, dequantize, pack_int4, quantize, unpack_int4


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def test_int4_packs_and_unpacks_without_loss():
    values = np.random.default_rng(0).integers(-8, 8, (3, 2, 96)).astype(np.int8)
    packed = pack_int4(jnp.array(values))
    assert packed.shape == (3, 2, 48)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack_int4(packed), values)


def test_int4_neighbours_are_16_bits_apart_in_the_word_of_their_thread():
    """Kernels rely on this order."""
    values = np.arange(64).reshape(1, 64)
    for place in range(64):
        one = jnp.array(np.where(values == place, 7, -8).astype(np.int8))
        (word,) = np.flatnonzero(np.array(pack_int4(one)).view("<u4")[0])
        within = place % 32
        assert word == place // 32 * 4 + within % 8 // 2
        shift = 16 * (within % 2) + 8 * (within // 16) + 4 * (within // 8 % 2)
        assert np.array(pack_int4(one)).view("<u4")[0, word] == 15 << shift


@pytest.mark.parametrize(("format", "dtype"), [("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn)])
def test_8_bits_have_a_scale_per_output(format, dtype):
    weight = normal(40, 3, 5)
    stored = quantize(weight, format)
    assert stored.values.dtype == dtype
    assert stored.values.shape == (3, 5, 40)
    assert (stored.inputs, stored.outputs, stored.zeros) == (40, (3, 5), None)
    assert stored.scales.shape == (3, 5)
    assert stored.scales.dtype == jnp.float32
    read, wide = np.array(dequantize(stored, jnp.float32)), np.moveaxis(np.array(weight), 0, -1)
    step = np.array(stored.scales)[..., None] / 2 if format == "int8" else np.maximum(np.abs(wide) / 16, 1e-3)
    assert (np.abs(read - wide) <= step * 1.001).all()
    assert np.abs(read - wide).max() > 1e-4
    np.testing.assert_allclose(np.abs(read).max(-1), np.abs(wide).max(-1), rtol=1e-6)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_has_a_scale_per_output_and_group(group_size, symmetric):
    weight = normal(256, 6) + (0 if symmetric else 0.7)
    stored = quantize(weight, "int4", group_size=group_size, symmetric=symmetric)
    assert (stored.inputs, stored.outputs, stored.group_size) == (256, (6,), group_size)
    assert stored.scales.shape == (6, 256 // group_size)
    assert (stored.zeros is None) == symmetric
    read = np.array(dequantize(stored, jnp.float32)).reshape(6, -1, group_size)
    wide = np.array(weight).T.reshape(6, -1, group_size)
    assert (np.abs(read - wide) <= np.array(stored.scales)[..., None] * 0.501).all()


def test_zero_points_pay_where_all_values_have_one_sign():
    weight = normal(128, 4) + 8
    errors = [
        float(jnp.abs(dequantize(quantize(weight, "int4", symmetric=s), jnp.float32).T - weight).mean())
        for s in (True, False)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_int4_scales_have_the_weight_s_dtype_and_values_are_made_for_them():
    weight = normal(128, 512, dtype=jnp.bfloat16)
    stored = quantize(weight, "int4")
    assert stored.scales.dtype == jnp.bfloat16
    error = jnp.abs(dequantize(stored, jnp.float32).T - weight.astype(jnp.float32))
    assert (error <= stored.scales.astype(jnp.float32)[:, 0] * 0.5001).all()


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_several_input_dimensions_become_one_and_experts_stay_in_front(format):
    weight = normal(2, 4, 32, 3)
    stored = quantize(weight, format, contract=2, batch=1)
    assert (stored.inputs, stored.outputs) == (128, (2, 3))
    for expert in range(2):
        alone = quantize(weight[expert].reshape(128, 3), format)
        np.testing.assert_array_equal(stored.values[expert], alone.values)
        np.testing.assert_array_equal(stored.scales[expert], alone.scales)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_outputs_of_zeros_stay_zeros(format):
    stored = quantize(normal(128, 2).at[:, 1].set(0.0), format)
    assert not np.array(dequantize(stored, jnp.float32))[1].any()
    assert np.isfinite(np.array(dequantize(stored, jnp.float32))).all()


def test_refusals():
    with pytest.raises(ValueError, match=r"no weight format 'int3'; there are: int8, fp8, int4"):
        quantize(normal(8, 8), "int3")
    with pytest.raises(ValueError, match=r"group_size is 48; int4 weights take one of 32, 64, 128"):
        quantize(normal(96, 8), "int4", group_size=48)
    with pytest.raises(ValueError, match=r"groups of 64 do not divide 96 inputs"):
        quantize(normal(96, 8), "int4", group_size=64)
