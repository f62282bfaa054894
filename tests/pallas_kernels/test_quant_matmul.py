"""quant_matmul equals the product with the weight its stored form stands for, on every implementation."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice
from pallas_kernels.formats import dequantize, quantize
from pallas_kernels.quant_matmul import kernel, quant_matmul, reference, xla
from pallas_kernels.quant_matmul.config import Config, choose
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.target import CPU, H200
from tests.pallas_kernels.interpreter import interpreter

TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Of the typical size of an output; covers its rounding where it is four times that."""
FORMATS = [
    ("int8", {}),
    ("fp8", {}),
    ("int4", {"group_size": 32}),
    ("int4", {"group_size": 64, "symmetric": False}),
    ("int4", {"group_size": 128}),
    ("int4", {"group_size": 128, "symmetric": False}),
]


def make(rows, inputs, outputs, format, dtype=np.float32, seed=0, **options):
    """Random activations and a random quantized weight; its outputs differ in size a thousandfold."""
    rng = np.random.default_rng(seed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    x = jnp.array(rng.standard_normal((rows, inputs)), dtype)
    size = np.logspace(-2, 1, np.prod(outputs)).reshape(outputs)
    weight = jnp.array((rng.standard_normal((inputs, *outputs)) + 0.3) * size, dtype)
    return x, jax.jit(functools.partial(quantize, format=format, **options))(weight)


def want_of(x, weight, activations=None):
    return reference.quant_matmul(np.array(x.astype(jnp.float32)), weight, activations)


def assert_equal(got, x, weight):
    """To within what x's dtype rounds, relative to the standard deviation of each output over random x."""
    size = np.linalg.norm(reference.weight_of(weight), axis=1).reshape(weight.outputs)
    error = np.abs(np.array(got.astype(jnp.float32)) - want_of(x, weight))
    assert (error <= TOLERANCE[x.dtype.name] * size).all(), (error / size).max()


@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_the_reference_multiplies_by_what_dequantize_reads(format, options):
    x, weight = make(5, 256, 7, format, **options)
    got = want_of(x, weight)
    np.testing.assert_allclose(got, np.array(x) @ np.array(dequantize(weight, jnp.float32)).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("format", "options"), FORMATS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(1, 128, 1), (3, 256, 513), (70, 384, 24)])
def test_xla_equals_the_reference(shape, format, options, dtype, platform):
    x, weight = make(*shape, format, dtype, **options)
    got = jax.jit(functools.partial(xla.quant_matmul, platform=platform))(x, weight)
    assert got.dtype == x.dtype
    assert_equal(got, x, weight)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_outputs_of_several_dimensions(format):
    x, weight = make(3, 128, (2, 5, 4), format)
    got = quant_matmul(x, weight)
    assert got.shape == (3, 2, 5, 4)
    assert_equal(got, x, weight)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_no_rows(format):
    x, weight = make(0, 128, 8, format)
    assert quant_matmul(x, weight).shape == (0, 8)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_in_float32_a_row_does_not_depend_on_the_others(format):
    x, weight = make(33, 512, 96, format)
    run = jax.jit(quant_matmul)
    crowd = np.array(run(x, weight))
    np.testing.assert_array_equal(run(x.at[1:].set(7.0), weight)[0], crowd[0])
    np.testing.assert_array_equal(run(x[::-1], weight)[::-1], crowd)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_a_cpu_never_holds_the_weight_in_full_precision(format):
    x, weight = make(2, 1024, 8192, format)
    compiled = jax.jit(quant_matmul).lower(x, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 8192 * 2


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_in_8_bits(format, dtype):
    x, weight = make(65, 256, 40, format, dtype)
    x = x * jnp.logspace(-3, 3, 65, dtype=dtype)[:, None]
    got = quant_matmul(quantize_rows(x, format), weight)
    want = want_of(x, weight, format)
    row = np.abs(want).max(axis=1, keepdims=True)
    assert (np.abs(np.array(got.astype(jnp.float32)) - want) <= TOLERANCE[dtype] * row).all()
    exact = want_of(x, weight)
    error = np.linalg.norm(want - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < (0.01 if format == "int8" else 0.04)


CUTS = [
    # rows of x in a tile, consumers, depth, stages, blocks, split, height; rows, inputs, outputs
    ("int8", {}, "bfloat16", Config(8, 2, 64, 3, 2), (5, 256, 384)),
    ("int8", {}, "float16", Config(8, 2, 256, 2, 2, height=40), (20, 768, 200)),
    ("int8", {}, "bfloat16", Config(8, 2, 64, 3, 8, split=4, height=48), (8, 768, 192)),
    ("int8", {}, "bfloat16", Config(16, 1, 64, 4, 3), (150, 128, 128)),
    ("fp8", {}, "bfloat16", Config(16, 1, 128, 2, 2), (1, 128, 192)),
    ("fp8", {}, "float16", Config(128, 2, 64, 2, 4), (200, 128, 128)),
    ("int4", {"group_size": 32, "symmetric": False}, "bfloat16", Config(8, 1, 128, 2, 2), (8, 640, 128)),
    ("int4", {"group_size": 64}, "float16", Config(8, 1, 128, 2, 2), (1, 640, 64)),
    ("int4", {"group_size": 128}, "bfloat16", Config(8, 2, 512, 2, 2), (3, 2560, 320)),
    ("int4", {"group_size": 32, "symmetric": False}, "float16", Config(16, 1, 64, 3, 4, split=2), (16, 1024, 192)),
    ("int8", {}, "bfloat16", Config(8, 4, 64, 3, 2, height=32, ways=4), (5, 1024, 160)),
    ("fp8", {}, "bfloat16", Config(16, 4, 64, 2, 4, split=2, ways=2), (11, 768, 192)),
    ("int4", {"group_size": 32, "symmetric": False}, "bfloat16", Config(8, 2, 64, 3, 1, ways=2), (3, 512, 128)),
]


@pytest.mark.parametrize(("format", "options", "dtype", "config", "shape"), CUTS)
def test_the_kernel_equals_the_reference_and_has_no_races(format, options, dtype, config, shape):
    x, weight = make(*shape, format, dtype, **options)
    with interpreter() as interpret:
        run = functools.partial(kernel.quant_matmul, out_dtype=x.dtype, config=config, interpret=interpret)
        got = jax.block_until_ready(jax.jit(run)(x, weight))
    assert got.dtype == x.dtype
    assert_equal(got, x, weight)


def scaled_by_second(first, second):
    return first * jnp.tanh(second)


COMBINED = [
    ("int8", {}, Config(8, 2, 64, 3, 2, height=32), (5, 256, 320)),
    ("fp8", {}, Config(16, 4, 64, 2, 2, ways=2), (12, 256, 320)),
    ("int4", {"group_size": 64, "symmetric": False}, Config(8, 4, 128, 2, 2), (3, 1024, 192)),
]


@pytest.mark.parametrize(("format", "options", "config", "shape"), COMBINED)
def test_the_halves_of_the_outputs_are_combined(format, options, config, shape):
    rows, inputs, outputs = shape
    x, weight = make(rows, inputs, 2 * outputs, format, "bfloat16", **options)
    with interpreter() as interpret:
        run = functools.partial(
            kernel.quant_matmul, out_dtype=jnp.float32, config=config, combine=scaled_by_second, interpret=interpret
        )
        got = jax.block_until_ready(jax.jit(run)(x, weight))
    want = want_of(x, weight)
    size = np.linalg.norm(reference.weight_of(weight), axis=1)[:outputs]
    want = np.array(scaled_by_second(want[:, :outputs], want[:, outputs:]))
    assert (np.abs(got - want) <= TOLERANCE["bfloat16"] * size).all()
    assert np.abs(want).max() > 10 * size.max() * TOLERANCE["bfloat16"]


@pytest.mark.parametrize("outputs", [128, 1792, 8960, 14336])
@pytest.mark.parametrize("rows", [1, 32, 256])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_blocks_that_share_inputs_never_combine(format, rows, outputs):
    """Their sums meet behind what combines, which takes whole ones."""
    weight = jax.eval_shape(
        functools.partial(quantize, format=format), jax.ShapeDtypeStruct((4096, 2 * outputs), jnp.bfloat16)
    )
    assert choose(rows, weight, 2, H200, parts=2).split == 1
    x, weight = make(3, 256, 128, "int8", "bfloat16")
    with pytest.raises(ValueError, match="split is 2; blocks that share inputs cannot combine halves"):
        kernel.quant_matmul(x, weight, x.dtype, Config(8, 2, 64, 3, 2, split=2), scaled_by_second)


@pytest.mark.parametrize(
    ("format", "rows", "outputs"), [("int8", 3, (3, 64)), ("fp8", 17, (192,)), ("int4", 2, (2, 64))]
)
def test_the_kernel_as_it_is_chosen(format, rows, outputs):
    x, weight = make(rows, 1024, outputs, format, "bfloat16")
    with interpreter() as interpret:
        got = quant_matmul(
            x, weight, out_dtype=jnp.float32, target=H200, implementation="mosaic", interpret=interpret
        ).block_until_ready()
    assert got.dtype == jnp.float32
    assert_equal(got, x, weight)


def test_why_the_kernel_does_not_run():
    x, weight = make(2, 128, 100, "int8", "bfloat16")
    run = functools.partial(quant_matmul, target=H200, implementation="mosaic")
    with pytest.raises(ValueError, match=r"it cannot be cut for 128 inputs and 100 outputs of int8"):
        run(x, weight)
    with pytest.raises(ValueError, match=r"it multiplies bfloat16 and float16, and x is float32"):
        run(x.astype(jnp.float32), weight)
    with pytest.raises(ValueError, match=r"x has no rows"):
        run(x[:0], weight)
    x, weight = make(2, 1024, 64, "int4", "bfloat16")
    with pytest.raises(ValueError, match=r"int4 scales in x's dtype, float16, and these are bfloat16"):
        run(x.astype(jnp.float16), weight)


@pytest.mark.parametrize(
    ("format", "rows", "inputs", "outputs", "winner"),
    [
        ("int8", 1, 4096, 28672, "mosaic"),
        ("int8", 2048, 4096, 28672, "mosaic"),
        ("fp8", 1, 4096, 28672, "mosaic"),
        ("fp8", 16, 4096, 28672, "xla"),
        ("int8", 1, 4096, 4096, "mosaic"),
        ("int8", 256, 4096, 4096, "mosaic"),
        ("int8", 256, 4096, 1024, "xla"),
        ("int8", 2048, 4096, 4096, "mosaic"),
        ("int4", 1, 4096, 4096, "mosaic"),
    ],
)
def test_the_kernel_runs_where_it_was_measured_to_be_faster(format, rows, inputs, outputs, winner):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, inputs), (inputs, outputs)))
    weight = jax.eval_shape(functools.partial(quantize, format=format), weight)
    with choice.recorded() as made:
        jax.eval_shape(functools.partial(quant_matmul, target=H200), x, weight)
    assert [decision.implementation for decision in made] == [winner]
    assert (made[0].obstacle is None) == (winner == "mosaic")


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096)])
def test_tiles_spread_over_the_whole_gpu(inputs, outputs):
    """At most 6 % of the GPU idles in the projections of Llama-3-8B."""
    weight = jax.eval_shape(
        functools.partial(quantize, format="int8"), jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)
    )
    cut = choose(1, weight, 2, H200)
    taken = cut.consumers // cut.ways
    turns = math.ceil(math.ceil(outputs / cut.height / taken) / (132 // cut.split))
    assert turns * taken * cut.height * inputs // cut.split <= inputs * outputs / 132 / 0.94


def test_refusals():
    x, weight = make(2, 128, 8, "int8")
    with pytest.raises(ValueError, match=r"x has shape \(2, 64\); it must be \[any, 128\]"):
        quant_matmul(x[:, :64], weight)
    with pytest.raises(ValueError, match=r"x is int32; quant_matmul takes bfloat16, float16, float32"):
        quant_matmul(x.astype(jnp.int32), weight)
    with pytest.raises(ValueError, match=r"x is fp8 and the weight int8; 8-bit matrix units take both in one format"):
        quant_matmul(quantize_rows(x, "fp8"), weight)
    marked = dataclasses.replace(make(2, 128, 8, "int4")[1], round_activations=True)
    with pytest.raises(ValueError, match=r"the weight is int4; only those in int8 and fp8 have activations rounded"):
        quant_matmul(x, marked)
    with pytest.raises(ValueError, match=r"the kernel of quant_matmul cannot run: it is written for Hopper GPUs"):
        quant_matmul(x.astype(jnp.bfloat16), weight, target=CPU, implementation="mosaic")


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("target", [CPU, H200], ids=["cpu", "gpu"])
def test_logits_come_as_they_were_summed(target, activations):
    """In float32 from bfloat16: between two values of bfloat16, mostly."""
    x, weight = make(4, 256, 33, "int8", jnp.bfloat16)
    matmul = jax.jit(functools.partial(quant_matmul, target=target, out_dtype=jnp.float32, implementation="xla"))
    got = matmul(x, dataclasses.replace(weight, round_activations=activations is not None))
    assert got.dtype == jnp.float32
    want = want_of(x, weight, activations)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * 16 * np.abs(want).max())
    assert np.mean(got == got.astype(jnp.bfloat16).astype(jnp.float32)) < 0.1
