"""The MLP's projections, every implementation against the reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice
from pallas_kernels.formats import quantize
from pallas_kernels.fused_mlp import activations, down, fused_mlp, gate_up, reference
from pallas_kernels.fused_mlp.activations import NAMES
from pallas_kernels.fused_mlp.config import PairConfig, StreamConfig, pair_config
from pallas_kernels.fused_mlp.pairs import paired
from pallas_kernels.fused_mlp.stream import stream
from pallas_kernels.target import CPU, H200
from tests.pallas_kernels.interpreter import interpreter

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Of the largest expected value."""


def normal(seed: int, shape: tuple[int, ...], dtype: str = "bfloat16", size: float = 1.0) -> jax.Array:
    return (size * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def run(implementation: str, fn, *args, target=H200, **options):
    """The op, in the interpreter if it is the kernel; with its races checked."""
    if implementation == "xla":
        return np.asarray(fn(*args, implementation="xla", **options).astype(jnp.float32))
    with interpreter() as interpret:
        out = fn(*args, implementation="mosaic", target=target, interpret=interpret, **options)
        return np.asarray(out.astype(jnp.float32))


def close(out: np.ndarray, expected: jax.Array, dtype: str) -> None:
    expected = np.asarray(expected)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max(initial=1e-6))


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "mosaic"])


@IMPLEMENTATIONS
@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_with_bias(implementation, activation):
    x, weight, bias = normal(0, (8, 64)), normal(1, (64, 2, 64), size=0.4), normal(2, (2, 64), size=2.0)
    out = run(implementation, gate_up, x, weight, bias, activation=activation)
    close(out, reference.gate_up(x, weight, bias, activation=activation), "bfloat16")


@IMPLEMENTATIONS
@pytest.mark.parametrize(("tokens", "dtype"), [(1, "float16"), (5, "bfloat16"), (63, "float16")])
def test_odd_numbers_of_tokens(implementation, tokens, dtype):
    x, weight = normal(0, (tokens, 192), dtype), normal(1, (192, 2, 192), dtype, 0.1)
    close(run(implementation, gate_up, x, weight), reference.gate_up(x, weight), dtype)


@IMPLEMENTATIONS
def test_plain_mlp(implementation):
    x, weight, bias = normal(0, (9, 128)), normal(1, (128, 128), size=0.1), normal(2, (128,))
    out = run(implementation, gate_up, x, weight, bias, activation="relu2", gated=False)
    close(out, reference.gate_up(x, weight, bias, activation="relu2", gated=False), "bfloat16")


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("tokens", "residual", "bias"),
    [(1, True, False), (16, False, True), (61, True, True), (65, True, True), (250, False, False)],
)
def test_down(implementation, tokens, residual, bias):
    hidden, weight = normal(0, (tokens, 320)), normal(1, (320, 128), size=0.1)
    added = normal(2, (tokens, 128)) if residual else None
    term = normal(3, (128,)) if bias else None
    close(
        run(implementation, down, hidden, weight, added, term), reference.down(hidden, weight, added, term), "bfloat16"
    )


@IMPLEMENTATIONS
def test_both_projections(implementation):
    x, residual, gate_up_weight = normal(0, (4, 64)), normal(1, (4, 64)), normal(2, (64, 2, 64), size=0.1)
    down_weight = normal(3, (64, 64), size=0.1)
    out = run(implementation, fused_mlp, x, gate_up_weight, down_weight, residual, activation="gelu_tanh")
    hidden = reference.gate_up(x, gate_up_weight, activation="gelu_tanh")
    close(out, reference.down(hidden, down_weight, residual), "bfloat16")


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_quantized_weights(format):
    x, residual = normal(0, (5, 128), "float32"), normal(1, (5, 128), "float32")
    gate_up_weight = quantize(normal(2, (128, 2, 64), "float32", 0.1), format)
    down_weight = quantize(normal(3, (64, 128), "float32", 0.1), format, group_size=32)
    out = run("xla", fused_mlp, x, gate_up_weight, down_weight, residual)
    expected = reference.down(reference.gate_up(x, gate_up_weight), down_weight, residual)
    close(out, expected, "float32")


QUANTIZED = [("int8", "gelu", 256, 9), ("fp8", "clamped_silu", 256, 3), ("int4", "silu", 1024, 2)]


@IMPLEMENTATIONS
@pytest.mark.parametrize(("format", "activation", "inputs", "tokens"), QUANTIZED)
def test_the_activation_behind_quantized_weights(implementation, format, activation, inputs, tokens):
    quantized = jax.jit(functools.partial(quantize, format=format))
    x, weight = normal(0, (tokens, inputs)), quantized(normal(1, (inputs, 2, 192), size=0.1))
    with choice.recorded() as made:
        out = run(implementation, gate_up, x, weight, activation=activation)
    assert [decision.implementation for decision in made] == [implementation]
    close(out, reference.gate_up(x, weight, activation=activation), "bfloat16")


@pytest.mark.parametrize("gated", [True, False])
def test_quantized_weights_without_a_gate_or_with_bias(gated):
    outputs = (2, 40) if gated else (40,)
    x, weight = normal(0, (3, 96), "float32"), quantize(normal(1, (96, *outputs), "float32"), "int8")
    bias = normal(2, outputs, "float32") if gated else None
    out = gate_up(x, weight, bias, activation="gelu_tanh", gated=gated)
    close(np.asarray(out), reference.gate_up(x, weight, bias, activation="gelu_tanh", gated=gated), "float32")


@pytest.mark.parametrize("activation", NAMES)
def test_float32_stays_float32(activation):
    x, weight, bias = (normal(i, shape, "float32") for i, shape in enumerate([(3, 96), (96, 2, 40), (2, 40)]))
    out = gate_up(x, weight, bias, activation=activation)
    assert out.dtype == jnp.float32
    close(np.asarray(out), reference.gate_up(x, weight, bias, activation=activation), "float32")


def test_no_tokens():
    out = fused_mlp(jnp.zeros((0, 64)), jnp.zeros((64, 2, 96)), jnp.zeros((96, 64)))
    assert out.shape == (0, 64)


def test_a_token_that_is_not_a_number_stays_alone():
    x, weight = normal(0, (3, 64)).at[1].set(jnp.nan), normal(1, (64, 2, 64))
    out = run("mosaic", gate_up, x, weight, activation="relu")
    assert np.isnan(out[1]).all()
    close(out[[0, 2]], reference.gate_up(x[jnp.array([0, 2])], weight, activation="relu"), "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "no activation 'swish'; there are: silu, gelu"),
        ({"activation": "clamped_silu", "gated": False}, "gated MLP only"),
        ({"gated": False}, r"weight is \(64, 2, 64\)"),
        ({"x": jnp.zeros((2, 65))}, r"for x \(2, 65\) it must be \[65, 2, any\]"),
        ({"bias": jnp.zeros((64,))}, r"bias has shape \(64,\); it must be \[2, 64\]"),
        ({"implementation": "mosaic"}, "written for Hopper"),
        ({"implementation": "mosaic", "target": H200}, "takes float16 or bfloat16"),
    ],
)
def test_what_gate_up_refuses(change, message):
    arguments = {"x": jnp.zeros((2, 64)), "weight": jnp.zeros((64, 2, 64)), "target": CPU} | change
    with pytest.raises(ValueError, match=message):
        gate_up(**arguments)


def test_what_down_refuses():
    hidden, weight = jnp.zeros((2, 64)), jnp.zeros((64, 128))
    with pytest.raises(ValueError, match=r"residual has shape \(2, 64\); it must be \[2, 128\]"):
        down(hidden, weight, hidden)
    with pytest.raises(ValueError, match="multiples of 64, not 64 and 72"):
        down(hidden.astype("float16"), jnp.zeros((64, 72), "float16"), implementation="mosaic", target=H200)


@IMPLEMENTATIONS
@pytest.mark.parametrize(("tokens", "dtype"), [(65, "bfloat16"), (290, "float16")])
def test_many_tokens(implementation, tokens, dtype):
    x, weight, bias = normal(0, (tokens, 64), dtype), normal(1, (64, 2, 192), dtype, 0.1), normal(2, (2, 192), dtype)
    out = run(implementation, gate_up, x, weight, bias, activation="gelu", target=dataclasses.replace(H200, cores=4))
    close(out, reference.gate_up(x, weight, bias, activation="gelu"), dtype)


@pytest.mark.parametrize(
    "config",
    [
        StreamConfig(rows=16, stages=2, split=2, blocks=1),
        StreamConfig(rows=16, consumers=2, stages=2, split=3),
        StreamConfig(rows=16, stages=2, chunk=128, blocks=1),
    ],
    ids=str,
)
def test_every_way_to_split_the_work(config):
    x, weight, residual = normal(0, (16, 256)), normal(1, (256, 2, 128), size=0.1), normal(2, (16, 128))
    with interpreter() as interpret:
        out = stream(x, weight, None, residual, activation="silu", config=config, interpret=interpret)
        out = np.asarray(out.astype(jnp.float32))
    close(out, reference.gate_up(x, weight) + residual.astype(jnp.float32), "bfloat16")


@pytest.mark.parametrize(
    "config",
    [
        PairConfig(rows=40, consumers=2, stages=2),
        PairConfig(rows=24, consumers=1, pairs=True, stages=8),
        PairConfig(rows=32, consumers=2, pairs=True, stages=2, chunk=128),
    ],
    ids=str,
)
def test_blocks_alone_and_in_pairs(config):
    x, weight, bias = normal(0, (40, 384)), normal(1, (384, 128), size=0.1), normal(2, (128,))
    residual, others = normal(3, (40, 128)), np.arange(40) != 37
    with interpreter() as interpret:
        out = paired(x.at[37].set(jnp.nan), weight, bias, residual, config=config, interpret=interpret)
        out = np.asarray(out.astype(jnp.float32))
    assert np.isnan(out[37]).all()
    close(out[others], reference.down(x, weight, residual, bias)[others], "bfloat16")


@pytest.mark.parametrize("tokens", [65, 96, 127, 128, 130, 192, 200, 256])
@pytest.mark.parametrize("outputs", [6144, 4096, 1280, 64])
def test_pairs_fit(tokens, outputs):
    config = pair_config(tokens, outputs, 132)
    blocks = 1 + config.pairs
    assert tokens <= config.rows * blocks < tokens + 8 * blocks
    assert outputs % (64 * config.consumers) == 0
    assert config.stages >= 3


def test_the_error_function_of_kernels():
    x = jnp.linspace(-6.0, 6.0, 4001)
    np.testing.assert_allclose(activations.erf(x), jax.lax.erf(x), rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("op", "shapes", "obstacle"),
    [
        (gate_up, [(16, 4096), (4096, 2, 14336)], None),
        (gate_up, [(512, 4096), (4096, 2, 14336)], None),
        (
            gate_up,
            [(16, 4096), (4096, 2, 256)],
            "it is known to be faster where its blocks occupy 80% to 100% of 132 cores once, not 2",
        ),
        (gate_up, [(128, 4096), (4096, 2, 7168)], "its tiles keep only 42% of the multiprocessors busy"),
        (down, [(16, 14336), (14336, 4096)], None),
        (down, [(15, 14336), (14336, 4096)], "below 16 tokens XLA's matmul is as fast"),
        (down, [(1, 4096), (4096, 6144)], None),
        (
            down,
            [(16, 4096), (4096, 512)],
            "it is known to be faster from 4096 inputs with 64 to 132 tiles, not 4096 and 8",
        ),
        (
            down,
            [(16, 1792), (1792, 4096)],
            "it is known to be faster from 4096 inputs with 64 to 132 tiles, not 1792 and 64",
        ),
        (down, [(128, 14336), (14336, 4096)], None),
        (
            down,
            [(129, 14336), (14336, 4096)],
            "from 8192 inputs, over 128 tokens, XLA's matmul is as fast",
        ),
        (down, [(65, 4096), (4096, 4096)], None),
        (down, [(128, 4096), (4096, 6144)], None),
        (down, [(256, 4096), (4096, 6144)], None),
        (down, [(256, 4096), (4096, 4096)], None),
        (down, [(256, 4096), (4096, 5120)], "its blocks keep less than 70% of 132 cores busy"),
        (down, [(257, 4096), (4096, 4096)], "over 256 tokens XLA's matmul, which adds the residual itself, is as fast"),
    ],
)
def test_what_runs_where(op, shapes, obstacle):
    with choice.recorded() as decisions:
        jax.eval_shape(
            functools.partial(op, target=H200), *[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        )
    assert [decision.obstacle for decision in decisions] == [obstacle]
