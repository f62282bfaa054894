"""The kernel of quant_matmul compiled for GPUs that are not there, at the sizes of Llama-3-8B."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.formats import quantize
from pallas_kernels.fused_mlp import gate_up
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.target import H200
from scripts.aot import compile_for_gpu

CASES = [
    # gpu, format, options, dtype, rows, inputs, outputs, temporaries at most
    ("h200", "int8", {}, "bfloat16", 1, 4096, 28672, 0),
    ("h100", "fp8", {}, "float16", 64, 4096, 28672, 0),
    ("h200", "int4", {"symmetric": False}, "bfloat16", 16, 4096, 28672, 0),
    ("h100", "int4", {"group_size": 64}, "float16", 64, 14336, 4096, 1 << 23),
    ("h200", "int8", {}, "bfloat16", 32, 14336, 4096, 1 << 22),
    ("h200", "int8", {}, "bfloat16", 256, 4096, 28672, 0),
]


@pytest.mark.parametrize(("gpu", "format", "options", "dtype", "rows", "inputs", "outputs", "temporary"), CASES)
def test_one_kernel_without_spills_or_copies(gpu, format, options, dtype, rows, inputs, outputs, temporary):
    """The weight is never held wider than it is stored, and x needs no preparation: it is one launch."""
    weight = jax.eval_shape(
        functools.partial(quantize, format=format, **options), jax.ShapeDtypeStruct((inputs, outputs), dtype)
    )
    run = functools.partial(quant_matmul, target=H200, implementation="mosaic")
    compiled, kernels = compile_for_gpu(run, jax.ShapeDtypeStruct((rows, inputs), jnp.dtype(dtype)), weight, gpu=gpu)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes <= temporary
    entry = compiled.as_text().split("ENTRY")[1]
    assert "fusion(" not in entry
    assert "copy(" not in entry


EIGHT_BITS = [
    # gpu, format, outputs of a gated MLP?, rows, inputs, outputs, temporaries at most
    ("h200", "int8", False, 1, 4096, 6144, 0),
    ("h100", "fp8", False, 16, 14336, 4096, 1 << 21),
    ("h200", "fp8", True, 128, 4096, 14336, 0),
    ("h200", "int8", True, 256, 4096, 14336, 0),
    ("h200", "int8", False, 256, 14336, 4096, 1 << 23),
    ("h200", "fp8", False, 256, 4096, 4096, 1 << 23),
    ("h200", "int8", False, 64, 1792, 4096, 1 << 21),
    ("h200", "int8", False, 64, 1024, 1536, 1 << 21),  # two steps: no loop keeps their sums from being read too early
]


@pytest.mark.parametrize(("gpu", "format", "gated", "rows", "inputs", "outputs", "temporary"), EIGHT_BITS)
def test_both_in_8_bits(gpu, format, gated, rows, inputs, outputs, temporary):
    """Neither is widened, and rows need no preparation: the layers of Llama-3-8B, and what one of 8 devices has."""
    shape = jax.ShapeDtypeStruct((inputs, 2, outputs) if gated else (inputs, outputs), jnp.bfloat16)
    weight = jax.eval_shape(functools.partial(quantize, format=format), shape)
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    x = jax.eval_shape(functools.partial(quantize_rows, format=format), x)
    run = functools.partial(gate_up if gated else quant_matmul, target=H200, implementation="mosaic")
    compiled, kernels = compile_for_gpu(run, x, weight, gpu=gpu)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes <= temporary
    entry = compiled.as_text().split("ENTRY")[1]
    assert "fusion(" not in entry
    assert "copy(" not in entry


def test_all_of_shared_memory_is_used_and_no_more():
    """Float32 outputs leave the least room; arrays of scales, of which 8-bit rows have their own, end anywhere."""
    weight = jax.ShapeDtypeStruct((4096, 128256), jnp.bfloat16)
    weight = jax.eval_shape(functools.partial(quantize, format="int8"), weight)
    x = jax.eval_shape(functools.partial(quantize_rows, format="int8"), jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16))
    run = functools.partial(quant_matmul, target=H200, implementation="mosaic", out_dtype=jnp.float32)
    _, [kernel] = compile_for_gpu(run, x, weight)
    assert kernel.spilled_bytes == 0


def test_rows_that_are_no_multiple_of_8_compile():
    weight = jax.eval_shape(functools.partial(quantize, format="int8"), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16))
    run = functools.partial(quant_matmul, target=H200, implementation="mosaic")
    _, kernels = compile_for_gpu(run, jax.ShapeDtypeStruct((20, 512), jnp.bfloat16), weight)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]


@pytest.mark.parametrize(("outputs", "dtype"), [(1000, "float32"), (960, "float32"), (1000, "bfloat16")])
def test_odd_numbers_of_outputs_compile_or_are_refused(outputs, dtype):
    """A head's logits are float32, of a vocabulary of any size."""
    weight = jax.ShapeDtypeStruct((512, outputs), jnp.bfloat16)
    weight = jax.eval_shape(functools.partial(quantize, format="int8"), weight)
    run = functools.partial(quant_matmul, target=H200, out_dtype=jnp.dtype(dtype))
    _, kernels = compile_for_gpu(run, jax.ShapeDtypeStruct((8, 512), jnp.bfloat16), weight)
    assert [kernel.spilled_bytes for kernel in kernels] == [0] * ((outputs, dtype) != (1000, "float32"))
