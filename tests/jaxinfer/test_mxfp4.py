"""gpt-oss as it is published, its experts in MXFP4: kept in 4 bits, with exactly the values that they stand for."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.config import Quantization
from jaxinfer.layerwise import restored
from jaxinfer.parameters import declare, flatten
from jaxinfer.startup import load_model
from meshes import build_mesh
from pallas_kernels.formats import QuantizedArray, dequantize, pack_int4, quantize
from tests import tiny, wide_experts
from tests.convert.meshed import assert_same, load_flat
from tests.jaxinfer.conftest import TINY

STORED = Quantization("mxfp4", layers=False)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The checkpoint, and a folder of the floats that it means."""
    folder = tmp_path_factory.mktemp("mxfp4")
    _, meant = wide_experts.write_mxfp4(folder / "mxfp4", num_hidden_layers=1, layer_types=["full_attention"])
    tiny.write_config(
        wide_experts.config("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"]), folder / "floats"
    )
    tiny.write_safetensors(meant, folder / "floats")
    return folder


def floats(codes):
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def powers(exponents):
    return exponents.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_code_times_every_scale(dtype):
    """As ml_dtypes reads them; results that float32 has no normal number for are zero here."""
    codes, exponents = np.tile(np.arange(32) % 16, (256, 1)), np.arange(256)[:, None]
    packed = pack_int4(jnp.asarray(codes.astype(np.int8) - np.int8(8)))
    got = dequantize(QuantizedArray(packed, jnp.asarray(exponents, jnp.uint8), None, "mxfp4", 32), dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        want = floats(codes) * powers(exponents)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32)[3:], want[3:])
    assert not np.asarray(got)[0].any()
    assert np.isnan(np.asarray(got)[255]).all()


def test_rounding_is_that_of_the_standard():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 3), np.float32) * np.float32(10.0) ** rng.integers(-6, 6, (1, 3))
    weight[:8, 0] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.9]  # halves, to even, of a scale of 1
    weight[8:32, 0] = 0
    made = jax.jit(functools.partial(quantize, format="mxfp4"))
    stored = made(weight)
    groups = weight.T.reshape(3, 2, 32)
    scales = 2.0 ** (np.floor(np.log2(np.abs(groups).max(-1))) - 2)
    np.testing.assert_array_equal(powers(np.asarray(stored.scales)), scales)
    want = (groups / scales[..., None]).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales[..., None]
    np.testing.assert_array_equal(dequantize(stored, jnp.float32), want.reshape(3, 64))
    again = made(want.reshape(3, 64).T)  # what is in the format stays
    np.testing.assert_array_equal(dequantize(again, jnp.float32), want.reshape(3, 64))


def test_it_is_kept_and_means_the_same_on_meshes_of_both_sizes(published, caplog):
    source = convert.open_checkpoint(published / "mxfp4")
    assert source.quantization == STORED
    assert "the projections of experts are kept in mxfp4, the others are read as floats" in caplog.text
    native = convert.open_checkpoint(convert.save_native(source, published / "native", progress=False))
    assert native.quantization == STORED
    parameters = dict(flatten(declare(source.config)))
    for tensor in (1, 2):
        kept = load_flat(source, tensor, quantization=STORED)
        assert_same(kept, load_flat(native, tensor, quantization=STORED))
        floats = load_flat(convert.open_checkpoint(published / "floats"), tensor)
        for name in ("expert_gate_up", "expert_down"):
            path = f"layers.0.mlp.{name}"
            np.testing.assert_array_equal(restored(kept[path], parameters[path]), floats[path])
            elements = floats[path].size
            assert sum(part.nbytes for part in jax.tree.leaves(kept[path])) == elements / 2 + elements / 32
        np.testing.assert_array_equal(kept["layers.0.attention.qkv"], floats["layers.0.attention.qkv"])
    with pytest.raises(ValueError, match="is quantized to mxfp4 already, and quantization is 'int8'; leave"):
        LLM(str(published / "mxfp4"), quantization="int8", **TINY)
    with pytest.raises(ValueError, match="quantization is 'mxfp4'; it must be one of int8, int4, fp8, or None"):
        LLM(str(published / "floats"), quantization="mxfp4", **TINY)


def test_the_model_on_two_devices_computes_what_its_weights_mean(published):
    prompt = [(7919 * n + 1) % 99 for n in range(40)]
    settings = {**TINY, "max_num_batched_tokens": 40}
    outputs = [
        LLM(str(published / name), tensor_parallel_size=size, **settings).generate({"prompt_token_ids": prompt}, SCORED)
        for name, size in (("mxfp4", 2), ("floats", 1))
    ]
    got, want = (output.prompt_logprobs for [output] in outputs)
    assert want.std(-1).min() > 0.5
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_a_mesh_that_would_cut_groups_takes_floats(published, caplog):
    """Of 64 inputs each of four devices has 16, and 32 share a scale."""
    source, mesh = convert.open_checkpoint(published / "mxfp4"), build_mesh(tensor=4)
    loaded = load_model(source, mesh, "float32", None, 0, progress=False)
    cut = "mxfp4 groups of 32 do not divide the 16 inputs of layers.0.mlp.expert_down on each device"
    assert f"{cut}; the projections are read as floats" in caplog.text
    assert loaded.quantization is None
    floats = convert.open_checkpoint(published / "floats").read("layers.0.mlp.expert_down", np.float32)
    np.testing.assert_array_equal(loaded.weights["layers"][0]["mlp"]["expert_down"], floats)
    native = convert.save_native(source, published / "stored", progress=False)
    with pytest.raises(ValueError, match=f"{cut}; use a smaller tensor_parallel_size"):
        load_model(convert.open_checkpoint(native), mesh, "float32", None, 0, progress=False)
