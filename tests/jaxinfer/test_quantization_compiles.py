"""Quantizing on a GPU needs no second copy of the weight it rounds, at a large model's sizes; compiled without one."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import Quantization
from jaxinfer.parameters import declare, flatten, quantized
from jaxinfer.presets import PRESETS
from scripts import aot

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
