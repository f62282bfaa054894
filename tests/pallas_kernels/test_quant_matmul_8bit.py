"""quant_matmul of rows and weights that both have 8 bits: the kernel sums what was rounded as numpy does."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice
from pallas_kernels.formats import quantize
from pallas_kernels.fused_mlp import gate_up
from pallas_kernels.quant_matmul import kernel, quant_matmul, reference
from pallas_kernels.quant_matmul.config import Config, choose
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.target import CPU, H200
from tests.pallas_kernels.interpreter import interpreter
from tests.pallas_kernels.test_quant_matmul import make, scaled_by_second


def rows_and_weight(rows, inputs, outputs, format):
    """Rows that differ in size a millionfold, as the outputs do a thousandfold."""
    x, weight = make(rows, inputs, outputs, format, "bfloat16")
    x = x * jnp.logspace(-3, 3, rows, dtype=x.dtype)[:, None]
    return x, quantize_rows(x, format), weight


def want_of(x, weight):
    """[rows, outputs] f32, and the size of each from the lengths of its row and output: rounding of sums is a share."""
    values = np.array(x.values).astype(np.float64) * np.array(x.scales, np.float64)[:, None]
    weights = reference.weight_of(weight).astype(np.float64)
    return values @ weights.T, np.linalg.norm(values, axis=1)[:, None] * np.linalg.norm(weights, axis=1)


CUTS = [
    ("int8", Config(8, 2, 64, 3, 2), (1, 256, 384)),
    ("fp8", Config(8, 2, 128, 2, 3), (7, 512, 192)),
    ("int8", Config(8, 2, 256, 2, 2, height=40), (9, 768, 200)),
    ("fp8", Config(8, 2, 64, 3, 8, split=4, height=48), (8, 768, 192)),
    ("fp8", Config(64, 1, 128, 2, 3), (65, 128, 128)),
    ("int8", Config(128, 2, 64, 2, 4), (130, 256, 128)),
    ("int8", Config(256, 2, 64, 2, 2), (256, 128, 128)),
    ("int8", Config(8, 4, 64, 3, 2, height=32, ways=4), (5, 1024, 160)),
    ("fp8", Config(16, 4, 64, 2, 4, split=2, ways=2), (11, 768, 192)),
]


@pytest.mark.parametrize(("format", "config", "shape"), CUTS)
def test_the_kernel_equals_the_reference_and_has_no_races(format, config, shape):
    _, x, weight = rows_and_weight(*shape, format)
    with interpreter() as interpret:
        run = functools.partial(kernel.quant_matmul, out_dtype=jnp.float32, config=config, interpret=interpret)
        got = jax.block_until_ready(jax.jit(run)(x, weight))
    want, size = want_of(x, weight)
    assert got.shape == shape[::2]
    assert (np.abs(got - want) <= 1e-6 * size).all()


def test_the_halves_of_the_outputs_are_combined():
    config, outputs = Config(16, 4, 64, 2, 2, height=40, ways=2), 200
    _, x, weight = rows_and_weight(12, 256, 2 * outputs, "fp8")
    with interpreter() as interpret:
        options = {"config": config, "combine": scaled_by_second, "interpret": interpret}
        got = jax.block_until_ready(
            jax.jit(functools.partial(kernel.quant_matmul, out_dtype="float32", **options))(x, weight)
        )
    want, size = want_of(x, weight)
    want = np.array(scaled_by_second(want[:, :outputs], want[:, outputs:]))
    assert (np.abs(got - want) <= 1e-5 * size[:, :outputs]).all()


def test_the_kernel_as_it_is_chosen_rounds_by_itself():
    x, _, weight = rows_and_weight(3, 1024, (3, 64), "int8")
    marked = dataclasses.replace(weight, round_activations=True)
    with interpreter() as interpret:
        options = {"out_dtype": jnp.float32, "target": H200, "implementation": "mosaic", "interpret": interpret}
        got = quant_matmul(x, marked, **options).block_until_ready()
    want, exact = (reference.quant_matmul(np.array(x.astype(jnp.float32)), weight, a) for a in ("int8", None))
    size = np.abs(want).max((1, 2), keepdims=True)
    assert (np.abs(got - want) <= 1e-5 * size).all()
    assert (np.abs(got - exact) > 1e-4 * size).any()


def test_a_marked_weight_of_an_mlp_takes_rows_as_they_are_or_rounded():
    x, rows, weight = rows_and_weight(4, 256, (2, 96), "int8")
    marked = dataclasses.replace(weight, round_activations=True)
    np.testing.assert_array_equal(gate_up(x, marked), gate_up(rows, weight))
    assert np.abs(gate_up(x, marked) - gate_up(x, weight)).max() > 0
    with pytest.raises(
        ValueError, match="x has 8 bits and the weight is bfloat16; rows in 8 bits take a weight in the"
    ):
        gate_up(rows, jnp.ones((256, 2, 96), jnp.bfloat16))


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "winner"),
    [(1, 4096, 6144, "mosaic"), (256, 4096, 28672, "mosaic"), (511, 4096, 28672, "mosaic"), (512, 4096, 28672, "xla")],
)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_where_the_kernel_runs(format, rows, inputs, outputs, winner):
    weight = jax.eval_shape(
        functools.partial(quantize, format=format), jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)
    )
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    x = jax.eval_shape(functools.partial(quantize_rows, format=format), x)
    with choice.recorded() as made:
        jax.eval_shape(functools.partial(quant_matmul, target=H200), x, weight)
    assert [decision.implementation for decision in made] == [winner]
    assert choose(rows, weight, 2, CPU, narrow=True) is None


@pytest.mark.parametrize("rows", [130, 256])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 4096), (14336, 4096), (4096, 28672), (1792, 4096)])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_sums_fit_into_registers(format, rows, inputs, outputs):
    """fp8 keeps those of a stage beside all of them, and int8's of 256 rows meet once at most."""
    weight = jax.eval_shape(
        functools.partial(quantize, format=format), jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)
    )
    cut = choose(rows, weight, 2, H200, narrow=True)
    assert cut.rows == 128 or (format == "int8" and min(cut.ways, cut.split) == 1)
