"""quantize_rows compiled for GPUs that are not there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.quantize_rows import norm_and_quantize_rows
from pallas_kernels.target import H200
from scripts import aot


@pytest.mark.parametrize(("gpu", "rows", "width", "format"), [("h200", 1, 4096, "int8"), ("h100", 256, 16384, "fp8")])
def test_compiles_to_one_kernel_without_spills(gpu, rows, width, format):
    fn = functools.partial(norm_and_quantize_rows, eps=1e-6, format=format, target=H200, implementation="mosaic")
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, width), (width,)))
    _, [kernel] = aot.compile_for_gpu(fn, x, x, scale, gpu=gpu)
    assert kernel.spilled_bytes == 0
