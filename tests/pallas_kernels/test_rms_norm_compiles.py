"""rms_norm compiled for GPUs that are not there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.target import H200
from scripts import aot


@pytest.mark.parametrize(
    ("gpu", "op", "rows", "embed"),
    [("h200", rms_norm, 1, 4096), ("h100", rms_norm, 256, 16384), ("h200", add_rms_norm, 256, 16384)],
)
def test_a_row_fits_in_registers(gpu, op, rows, embed):
    fn = functools.partial(op, eps=1e-6, target=H200, implementation="mosaic")
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, embed), (embed,)))
    compiled, [kernel] = aot.compile_for_gpu(fn, *([x] if op is rms_norm else [x, x]), scale, gpu=gpu)
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 255
    assert compiled.memory_analysis().temp_size_in_bytes == 0
