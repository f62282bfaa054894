"""The MLP's kernels, compiled for GPUs that are not here, at the sizes of real models."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.formats import quantize
from pallas_kernels.fused_mlp import down, gate_up
from pallas_kernels.target import H200
from scripts.aot import compile_for_gpu

# tokens, inputs, outputs, dtype, activation, bias, GPU
GATE_UP = {
    "llama-3-8b, 1 token": (1, 4096, 14336, jnp.bfloat16, "silu", False, "h200"),
    "llama-3-8b, 64 tokens": (64, 4096, 14336, jnp.bfloat16, "silu", False, "h100"),
    "llama-3-8b, 300 tokens": (300, 4096, 14336, jnp.bfloat16, "silu", False, "h100"),
    "gemma-like with bias, 4000 tokens": (4000, 3584, 14272, jnp.float16, "gelu", True, "h200"),
}


@pytest.mark.parametrize("name", GATE_UP)
def test_gate_up(name):
    tokens, inputs, mlp, dtype, activation, bias, gpu = GATE_UP[name]
    x, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in [(tokens, inputs), (inputs, 2, mlp)])
    terms = jax.ShapeDtypeStruct((2, mlp), dtype) if bias else None
    op = functools.partial(gate_up, activation=activation, target=H200, implementation="mosaic")
    compiled, kernels = compile_for_gpu(op, x, weight, terms, gpu=gpu)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]
    assert kernels[0].registers <= 168  # three warpgroups
    padded = 2 * (tokens + 8) * (inputs + mlp) if tokens > 8 and tokens % 8 else 0
    assert compiled.memory_analysis().temp_size_in_bytes <= padded


@pytest.mark.parametrize(
    ("format", "tokens", "gpu"), [("fp8", 64, "h200"), ("int4", 16, "h100"), ("int8", 128, "h200")]
)
def test_quantized_gate_up_is_one_kernel(format, tokens, gpu):
    weight = jax.ShapeDtypeStruct((4096, 2, 14336), jnp.bfloat16)
    weight = jax.eval_shape(functools.partial(quantize, format=format), weight)
    op = functools.partial(gate_up, target=H200, implementation="mosaic")
    compiled, kernels = compile_for_gpu(op, jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16), weight, gpu=gpu)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    assert "fusion(" not in compiled.as_text().split("ENTRY")[1]


@pytest.mark.parametrize(("tokens", "gpu"), [(1, "h100"), (64, "h200")])
def test_down(tokens, gpu):
    shapes = [(tokens, 14336), (14336, 4096), (tokens, 4096), (4096,)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    op = functools.partial(down, target=H200, implementation="mosaic")
    compiled, kernels = compile_for_gpu(op, *arrays, gpu=gpu)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]
    sums = 4 * 4096 * 64
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * sums


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "gpu"),
    [(65, 14336, 4096, "h100"), (128, 4096, 6144, "h200"), (256, 4096, 4096, "h200"), (200, 4096, 6144, "h100")],
)
def test_down_in_pairs(tokens, inputs, outputs, gpu):
    shapes = [(tokens, inputs), (inputs, outputs), (tokens, outputs), (outputs,)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    op = functools.partial(down, target=H200, implementation="mosaic")
    compiled, kernels = compile_for_gpu(op, *arrays, gpu=gpu)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]
    padded = 2 * (tokens + 8) * (inputs + 2 * outputs) if tokens % 8 else 0
    sums = 4 * outputs * -(-tokens // 8) * 8 if 2 * outputs // 64 <= H200.cores and tokens <= 128 else 0
    assert compiled.memory_analysis().temp_size_in_bytes <= padded + 1.1 * sums
