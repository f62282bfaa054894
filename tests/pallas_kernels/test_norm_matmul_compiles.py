"""A norm within the kernel of a projection, compiled for GPUs that are not here, at the sizes of Llama-3-8B."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.formats import quantize
from pallas_kernels.norm_matmul import Norm, norm_gate_up, norm_projection
from pallas_kernels.target import H200
from scripts.aot import compile_for_gpu


@pytest.mark.parametrize(
    ("gpu", "format", "rows", "outputs", "dtype"),
    [
        ("h100", None, 8, (6144,), jnp.float16),
        ("h200", "int8", 1, (2, 14336), jnp.bfloat16),
        ("h200", "int4", 3, (8, 6, 128), jnp.bfloat16),
    ],
)
def test_one_kernel_without_spills_or_copies(gpu, format, rows, outputs, dtype):
    x, scale, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 4096), (4096,), (4096, *outputs)))
    if format is not None:
        weight = jax.eval_shape(functools.partial(quantize, format=format), weight)
    op = norm_gate_up if len(outputs) == 2 else norm_projection

    def run(x, delta, scale, weight):
        return op(x, Norm(scale, delta, 1e-5), weight, target=H200, implementation="mosaic")

    compiled, kernels = compile_for_gpu(run, x, x, scale, weight, gpu=gpu)
    assert [kernel.spilled_bytes for kernel in kernels] == [0]
    assert compiled.memory_analysis().temp_size_in_bytes <= 64  # pointers
    entry = compiled.as_text().split("ENTRY")[1]
    assert "fusion(" not in entry
    assert "copy(" not in entry
