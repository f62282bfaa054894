"""Experts in 8 and 4 bits: what the rounded weights compute, on any mesh, loaded as they were stored."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert
from jaxinfer import SamplingParams
from jaxinfer.cli.info import describe
from jaxinfer.config import ModelConfig, Quantization, RopeConfig
from jaxinfer.layerwise import restored
from jaxinfer.models.moe import Moe
from jaxinfer.parameters import declare, flatten, moe_parameters, quantized
from jaxinfer.verify import compare
from jaxinfer.weights import size_in_bytes
from meshes import build_mesh
from pallas_kernels.moe import reference
from pallas_kernels.target import CPU
from tests import wide_experts
from tests.convert.meshed import assert_same, load_flat

SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
INT4 = Quantization("int4", 32)
LAYER = ModelConfig(
    "qwen2_moe", 11, 64, 1, 2, 2, 32, 128, 16, RopeConfig(), norm_scale=True,
    num_experts=5, experts_per_token=2, expert_size=128, shared_expert_size=128, shared_expert_gate=False,
)  # fmt: skip


def test_a_layer_on_two_devices_computes_what_its_rounded_weights_mean():
    quantization = Quantization("int4", 64, symmetric=False)
    rng, parameters = np.random.default_rng(0), moe_parameters(LAYER)
    weights = {
        name: jnp.asarray(rng.standard_normal(p.shape, np.float32) * p.fan_in**-0.5) for name, p in parameters.items()
    }
    projections = {name: p for name, p in parameters.items() if name != "router"}
    stored = {
        name: jax.jit(quantized, static_argnums=(1, 2))(weights[name], p, quantization)
        for name, p in projections.items()
    }
    meant = {name: np.asarray(jax.jit(restored, static_argnums=1)(stored[name], p)) for name, p in projections.items()}
    x, scale = rng.standard_normal((7, 64), np.float32), jnp.ones(64)
    layer = Moe(LAYER, {**weights, **stored}, build_mesh(tensor=2))
    _, out = jax.jit(lambda x: layer(x, None, {"norm": {"scale": scale}}, CPU))(x)

    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + LAYER.norm_eps)
    exponents = np.exp(normed @ weights["router"])
    experts = np.argsort(-exponents, axis=-1)[:, :2].astype(np.int32)
    chosen = np.take_along_axis(exponents, experts, axis=-1)
    shares = chosen / chosen.sum(-1, keepdims=True)
    gate, up = np.moveaxis(np.tensordot(normed, meant["shared_gate_up"], 1), 1, 0)
    want = reference.moe(normed, experts, shares, meant["expert_gate_up"], meant["expert_down"])
    want = want + reference.activation_of("silu", gate, up) @ meant["shared_down"]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5 * np.abs(want).max())
    for name, parameter in projections.items():  # and nothing else than rounding happened to them
        step = np.abs(weights[name]).max() / 7
        assert 0 < np.abs(meant[name] - weights[name]).max() < step, name
        assert parameter.stored_shape[-1] == stored[name].inputs


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide") / "hf"
    return convert.open_checkpoint(wide_experts.write("qwen2_moe", folder, num_hidden_layers=1))


@pytest.fixture(scope="module")
def native(wide):
    folder = wide.path.parent / "native"
    return convert.open_checkpoint(convert.save_native(wide, folder, quantization=INT4, progress=False))


def test_stored_or_quantized_while_loading_the_same_bits(wide, native):
    loaded = load_flat(native, 2, quantization=INT4)
    assert_same(loaded, load_flat(wide, 2, quantization=INT4))
    down = loaded["layers.0.mlp.expert_down"]
    assert down.values.shape == (6, 64, 32)
    assert down.values.addressable_shards[0].data.nbytes == down.values.nbytes // 2
    # and what `jaxinfer info` says of it without reading it
    said = describe(native.config, native.quantization)["weight_bytes"]["float32"]
    padding = 2 * 64 * 4  # a row of the embedding and one of the head
    assert said == size_in_bytes(loaded) - padding


def test_a_wrong_expert_is_found_by_verify(wide, native):
    path = "layers.0.mlp.expert_down"
    weight, stored = wide.read(path, "float32"), load_flat(native, quantization=INT4)[path]
    parameter = dict(flatten(declare(wide.config)))[path]
    compared = compare(path, parameter, weight, stored)
    assert (compared.kind, compared.mismatch) == ("int4, to nearest", None)
    assert 0.8 < compared.worst <= 1.0
    weight[4, 3] *= 1.5
    assert compare(path, parameter, weight, stored).mismatch.startswith(f"{path}: ")


def test_it_is_exported_as_gptq_and_kept_when_that_is_read(wide, native, tmp_path):
    exported = convert.open_checkpoint(convert.save_safetensors(native, tmp_path / "gptq", progress=False))
    assert exported.quantization == INT4
    assert "model.layers.0.mlp.experts.5.down_proj.qweight" in exported.reader._reader.tensors
    # scales are stored in float16 there
    got, want = (load_flat(c, 2, quantization=INT4)["layers.0.mlp.expert_gate_up"] for c in (exported, native))
    np.testing.assert_array_equal(got.values, want.values)
    np.testing.assert_array_equal(got.scales, np.asarray(want.scales).astype(np.float16).astype(np.float32))


def test_what_an_older_version_wrote_keeps_its_experts_as_they_are(wide, tmp_path):
    older = dataclasses.replace(Quantization("int8"), experts=False)
    folder = convert.save_native(wide, tmp_path / "native", quantization=older, progress=False)
    written = json.loads((folder / "jaxinfer.json").read_text())
    assert written["format_version"] == 2
    assert "experts" not in written["quantization"]
    native = convert.open_checkpoint(folder)
    assert native.quantization == older
    loaded = load_flat(native, quantization=older)
    np.testing.assert_array_equal(loaded["layers.0.mlp.expert_down"], wide.read("layers.0.mlp.expert_down", "float32"))
    assert loaded["layers.0.mlp.shared_down"].format == "int8"
