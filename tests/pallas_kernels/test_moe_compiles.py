"""The kernels of moe compile for H100 and H200 at production shapes without spilling, and copy no weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.formats import quantize
from pallas_kernels.moe import moe
from pallas_kernels.target import H200
from scripts.aot import compile_for_gpu


def weight(format, experts, inputs, *outputs):
    if format == "bf16":
        return jax.ShapeDtypeStruct((experts, inputs, *outputs), jnp.bfloat16)
    made = jax.ShapeDtypeStruct((experts, inputs, *outputs), jnp.bfloat16)
    return jax.eval_shape(functools.partial(quantize, format=format, batch=1, symmetric=False), made)


def shapes(tokens, experts, top_k, embed, mlp, format="bf16"):
    choices = functools.partial(jax.ShapeDtypeStruct, (tokens, top_k))
    weights = weight(format, experts, embed, 2, mlp), weight(format, experts, mlp, embed)
    return jax.ShapeDtypeStruct((tokens, embed), jnp.bfloat16), choices(jnp.int32), choices(jnp.float32), *weights


@pytest.mark.parametrize(
    ("gpu", "shape", "temporary"),
    [
        ("h200", (64, 8, 2, 4096, 14336), 20e6),  # Mixtral 8x7B
        ("h200", (4096, 8, 2, 4096, 14336), 350e6),
        ("h100", (1, 128, 8, 2048, 768), 2e6),  # Qwen3 30B-A3B
        ("h100", (2048, 32, 4, 2880, 2880), 220e6),  # gpt-oss 20B
        ("h200", (64, 8, 2, 4096, 14336, "int8"), 20e6),
        ("h200", (64, 128, 8, 2048, 768, "int4"), 60e6),
        ("h200", (64, 32, 4, 2880, 2880, "mxfp4"), 30e6),  # gpt-oss 20B as it is published
    ],
    ids=str,
)
def test_production_shapes(gpu, shape, temporary):
    compiled, kernels = compile_for_gpu(functools.partial(moe, target=H200), *shapes(*shape), gpu=gpu)
    assert len(kernels) == 2
    assert [kernel.spilled_bytes for kernel in kernels] == [0, 0]
    assert compiled.memory_analysis().temp_size_in_bytes < temporary
