"""Quantizing on a GPU needs no second copy of the weight it rounds, at a large model's sizes; nor does a layer of many
experts need them as floats. Compiled without a GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from convert.placement import _filling
from jaxinfer.config import ModelConfig, Quantization, RopeConfig
from jaxinfer.models.layers import Mlp
from jaxinfer.models.moe import Moe
from jaxinfer.parameters import abstract_parameter, declare, flatten, mlp_parameters, moe_parameters, quantized
from jaxinfer.presets import PRESETS
from jaxinfer.weights import size_in_bytes
from meshes import AXES, sharding
from pallas_kernels.target import H200
from scripts import aot

# The experts of Qwen3-30B-A3B.
ROUTED = ModelConfig(
    "qwen3_moe", 2048, 2048, 1, 32, 4, 128, 6144, 4096, RopeConfig(),
    num_experts=128, experts_per_token=8, expert_size=768,
)  # fmt: skip
PUBLISHED = ModelConfig(
    "gpt_oss", 2048, 2880, 1, 64, 8, 64, 2880, 4096, RopeConfig(),
    num_experts=32, experts_per_token=4, expert_size=2880, expert_bias=True, activation="clamped_silu",
)  # fmt: skip
PARAMETERS = dict(flatten(declare(PRESETS["llama-3-8b"])))


@pytest.mark.parametrize(
    ("path", "quantization"),
    [
        ("layers.0.mlp.gate_up", Quantization("int8")),
        ("layers.0.mlp.gate_up", Quantization("int4", 128)),
        ("head.weight", Quantization("fp8")),
    ],
    ids=str,
)
def test_temporaries_are_small_beside_the_weight(path, quantization):
    parameter = PARAMETERS[path]
    weight = jax.ShapeDtypeStruct(parameter.shape, jnp.bfloat16)
    compiled, _ = aot.compile_for_gpu(lambda weight: quantized(weight, parameter, quantization), weight)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * memory.argument_size_in_bytes
    assert memory.output_size_in_bytes < 0.51 * memory.argument_size_in_bytes


def test_experts_are_rounded_one_at_a_time_in_place():
    parameter, quantization = moe_parameters(ROUTED)["expert_gate_up"], Quantization("int4", 128)
    place = functools.partial(sharding, aot.gpu_mesh("h200", axes=AXES))
    weight, leaf = (abstract_parameter(parameter, jnp.dtype(jnp.bfloat16), place, how) for how in (None, quantization))
    _, put_one = _filling(parameter, leaf)
    memory = put_one.lower(leaf, weight, 3).compile().memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes
    assert memory.temp_size_in_bytes < 3 * weight.size * 2 / 128


def compiled_layer(config, quantization, tokens):
    """The program of a layer's experts for an H200, and the bytes of their weights."""
    mesh = aot.gpu_mesh("h200", axes=AXES)
    place, bfloat16 = functools.partial(sharding, mesh), jnp.dtype(jnp.bfloat16)
    weights = {
        name: abstract_parameter(parameter, bfloat16, place, quantization)
        for name, parameter in moe_parameters(config).items()
    }
    embed = config.hidden_size
    x, scale = (jax.ShapeDtypeStruct(shape, bfloat16, sharding=place(())) for shape in ((tokens, embed), (embed,)))

    def layer(x, scale, weights):
        return Moe(config, weights, mesh)(x, None, {"norm": {"scale": scale}}, H200)

    return jax.jit(layer).lower(x, scale, weights).compile(), size_in_bytes(weights)


def test_a_layer_of_experts_takes_them_as_they_are_stored():
    """The kernels read 4 bits: the program's arguments are those, and nothing as large is made beside them."""
    compiled, stored = compiled_layer(ROUTED, Quantization("int4", 128), 16)
    memory, text, elements = compiled.memory_analysis(), compiled.as_text(), 3 * 128 * 2048 * 768
    assert stored < elements / 2 * 1.04
    assert memory.argument_size_in_bytes < stored + (1 << 20)
    assert memory.temp_size_in_bytes < elements / 128 * 4
    assert text.count('custom_call_target="mosaic_gpu') == 3  # the norm and two products
    assert " while(" not in text


def test_without_a_kernel_experts_become_floats_one_at_a_time():
    """One device's half of gpt-oss-20b in MXFP4: the arguments are its 4.25 bits, and the temporaries those of one."""
    config, size = dataclasses.replace(PUBLISHED, expert_size=1440), 1440
    compiled, stored = compiled_layer(config, Quantization("mxfp4", layers=False), 16)
    memory, elements = compiled.memory_analysis(), 3 * 32 * 2880 * size
    assert 'custom_call_target="mosaic_gpu' not in compiled.as_text()
    assert stored < elements / 8 * 4.25 * 1.005
    assert memory.argument_size_in_bytes < stored + (1 << 20)
    assert memory.temp_size_in_bytes < elements / 32 * 2 * 3


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_an_mlp_with_activations_in_8_bits_is_four_kernels(format):
    """The sum and its norm in 8 bits, gate and up, what that gives in 8 bits, down: nothing between them."""
    config, mesh = PRESETS["llama-3-8b"], aot.gpu_mesh("h200", axes=AXES)
    place, bfloat16 = functools.partial(sharding, mesh), jnp.dtype(jnp.bfloat16)
    weights = {
        name: dataclasses.replace(
            abstract_parameter(parameter, bfloat16, place, Quantization(format)), round_activations=True
        )
        for name, parameter in mlp_parameters(config).items()
    }
    x, scale = (jax.ShapeDtypeStruct(shape, bfloat16, sharding=place(())) for shape in ((64, 4096), (4096,)))

    def layer(x, delta, scale, weights):
        return Mlp(config, weights, mesh)(x, delta, {"norm": {"scale": scale}}, H200)

    with aot.mosaic_dump():
        entry = jax.jit(layer).lower(x, x, scale, weights).compile().as_text().split("ENTRY")[1]
    assert entry.count('custom_call_target="mosaic_gpu_v2"') == 4
    assert "fusion(" not in entry
