"""moe and grouped_matmul: every implementation computes what the reference says, for any distribution of tokens."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import QuantizedArray, dequantize, quantize
from pallas_kernels.fused_mlp.activations import NAMES
from pallas_kernels.moe import config, grouped_matmul, moe, reference
from pallas_kernels.moe.config import PrefillConfig
from pallas_kernels.moe.plan import most_tiles, plan, plan_sorted
from pallas_kernels.target import CPU, H200
from tests.pallas_kernels.interpreter import interpreter

SMALL_GPU = dataclasses.replace(H200, cores=2)
"""Few blocks, each with several turns."""
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Of the largest expected value."""
BOTH = pytest.mark.parametrize("mode", ["xla float32", "mosaic bfloat16"])


def normal(seed: int, *shape: int, size: float = 1.0) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal(shape, np.float32)


def wide(x: jax.Array | QuantizedArray) -> np.ndarray:
    """As the reference takes it: float32, inputs before outputs."""
    if isinstance(x, QuantizedArray):
        return np.moveaxis(np.asarray(dequantize(x, jnp.float32)), -1, 1)
    return np.asarray(x, np.float32)


def run(mode: str, op, *args, **options) -> np.ndarray:
    """mode: implementation and dtype. In the interpreter, with its races checked, if it is the kernel."""
    implementation = mode.split()[0]
    if implementation == "xla":
        return np.asarray(jax.jit(functools.partial(op, implementation="xla", **options))(*args), np.float32)
    with interpreter() as interpret:
        out = op(*args, implementation="mosaic", target=SMALL_GPU, interpret=interpret, **options)
        return np.asarray(out, np.float32)


def close(out: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    assert out.shape == expected.shape
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(
        out, expected, rtol=0, atol=TOLERANCE[dtype] * max(np.abs(expected).max(initial=0), 1e-6)
    )


def experts_of(name: str, tokens: int, top_k: int, num_experts: int) -> np.ndarray:
    """Distinct experts of each token, by name of the distribution."""
    rng = np.random.default_rng(7)
    chosen = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(tokens)]) if tokens else np.zeros((0, top_k))
    if name == "few experts":  # most experts are empty, the first and the last among them
        chosen = np.stack([rng.permutation(top_k) + 1 for _ in range(tokens)])
    if name == "padding":
        chosen[1::3] = num_experts
    return chosen.astype(np.int32)


def check(mode, tokens, top_k, num_experts, embed, mlp, distribution="even", biased=False, activation="silu"):
    dtype = mode.split()[1]
    experts = experts_of(distribution, tokens, top_k, num_experts)
    x, weights = normal(1, tokens, embed).astype(dtype), np.abs(normal(2, tokens, top_k))
    x[experts[:, 0] == num_experts] = np.nan
    weights[experts == num_experts] = np.nan
    gate_up, down = normal(3, num_experts, embed, 2, mlp, size=0.1), normal(4, num_experts, mlp, embed, size=0.1)
    bias = {"gate_up_bias": normal(5, num_experts, 2, mlp), "down_bias": normal(6, num_experts, embed)}
    bias = {name: jnp.asarray(b, dtype) for name, b in bias.items()} if biased else {}
    gate_up, down = jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)
    out = run(mode, moe, jnp.asarray(x), experts, weights, gate_up, down, activation=activation, **bias)
    expected = reference.moe(
        wide(x), experts, weights, wide(gate_up), wide(down), activation=activation,
        **{name: wide(b) for name, b in bias.items()},
    )  # fmt: skip
    close(out, expected, dtype)
    return out, experts


@pytest.mark.parametrize("mode", ["xla float32", "xla bfloat16", "xla float16", "mosaic bfloat16", "mosaic float16"])
def test_few_tokens(mode):
    check(mode, 5, 2, 4, 64, 192)


@pytest.mark.parametrize(
    ("mode", "tokens", "top_k", "num_experts"),
    [("xla float32", 1, 1, 3), ("xla float32", 1, 2, 8), ("xla float32", 13, 3, 5), ("xla float32", 33, 1, 2),
     ("mosaic bfloat16", 1, 2, 8), ("mosaic bfloat16", 33, 1, 2)],
)  # fmt: skip
def test_numbers_of_tokens_and_experts(mode, tokens, top_k, num_experts):
    check(mode, tokens, top_k, num_experts, 128, 128)


@BOTH
def test_many_tokens(mode):
    """More than a tile of 128 rows an expert."""
    check(mode, 300, 2, 3, 64, 64, biased=True)


@pytest.mark.parametrize("tokens", [7, 140])
def test_widths_that_128_does_not_divide(tokens):
    check("mosaic bfloat16", tokens, 1, 2, 192, 192, biased=True)


@BOTH
def test_padding_adds_nothing_and_its_garbage_goes_nowhere(mode):
    out, experts = check(mode, 10, 2, 4, 64, 64, "padding", biased=True)
    assert not out[experts[:, 0] == 4].any()


@BOTH
def test_experts_without_tokens_are_not_read(mode):
    """They hold NaN, and the layout gives them no tile."""
    dtype = mode.split()[1]
    experts = experts_of("few experts", 9, 2, 6)
    x, weights = normal(1, 9, 64).astype(dtype), np.ones((9, 2), np.float32)
    gate_up, down = normal(3, 6, 64, 2, 64, size=0.1), normal(4, 6, 64, 64, size=0.1)
    expected = reference.moe(wide(x), experts, weights, gate_up, down)
    for weight in (gate_up, down):
        weight[[0, 3, 4, 5]] = np.nan
    out = run(mode, moe, x, experts, weights, jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype))
    close(out, expected, dtype)
    assert int(plan(jnp.asarray(experts.reshape(-1)), 6, 16).live[0]) == 2


@pytest.mark.parametrize(
    ("mode", "activation"), [*(("xla float32", name) for name in NAMES), ("mosaic bfloat16", "clamped_silu")]
)
def test_activations(mode, activation):
    check(mode, 3, 1, 2, 64, 64, biased=True, activation=activation)


@BOTH
def test_all_padding_is_zero(mode):
    x, gate_up, down = (jnp.ones(shape, mode.split()[1]) for shape in [(4, 64), (3, 64, 2, 64), (3, 64, 64)])
    out = run(mode, moe, x, np.full((4, 2), 3, np.int32), np.ones((4, 2), np.float32), gate_up, down)
    np.testing.assert_array_equal(out, np.zeros((4, 64)))


def test_no_tokens():
    weights = jnp.zeros((3, 64, 2, 64)), jnp.zeros((3, 64, 64))
    for top_k, tokens in [(2, 0), (0, 4)]:
        empty = jnp.zeros((tokens, top_k))
        out = moe(jnp.ones((tokens, 64)), empty.astype(jnp.int32), empty, *weights)
        np.testing.assert_array_equal(out, np.zeros((tokens, 64)))
    assert grouped_matmul(jnp.zeros((0, 64)), weights[0], jnp.zeros(3, jnp.int32)).shape == (0, 2, 64)


FORMATS = [
    {"format": "int8"},
    {"format": "fp8"},
    {"format": "int4", "group_size": 32},
    {"format": "int4", "group_size": 64, "symmetric": False},
    {"format": "mxfp4"},
]


@pytest.mark.parametrize(
    ("mode", "tokens", "options"),
    [
        *(("xla float32", tokens, options) for tokens in (9, 200) for options in FORMATS),
        *(("mosaic bfloat16", 9, options) for options in FORMATS),
        ("mosaic float16", 9, FORMATS[0]),
    ],
    ids=str,
)
def test_quantized_weights(mode, tokens, options):
    dtype = mode.split()[1]
    embed, mlp = {32: (384, 128), 64: (768, 256)}.get(options.get("group_size"), (128, 256))
    if options["format"] == "mxfp4":
        embed, mlp = 320, 192  # which 64 divides and 128 does not, as gpt-oss's 2880
    experts, weights = experts_of("padding", tokens, 2, 3), np.abs(normal(2, tokens, 2))
    gate_up = quantize(jnp.asarray(normal(3, 3, embed, 2, mlp, size=0.1), dtype), batch=1, **options)
    down = quantize(jnp.asarray(normal(4, 3, mlp, embed, size=0.1), dtype), batch=1, **options)
    x, bias = jnp.asarray(normal(1, tokens, embed), dtype), jnp.asarray(normal(5, 3, 2, mlp), dtype)
    out = run(mode, moe, x, experts, weights, gate_up, down, gate_up_bias=bias)
    expected = reference.moe(wide(x), experts, weights, wide(gate_up), wide(down), gate_up_bias=wide(bias))
    close(out, expected, dtype)


def test_one_weight_quantized():
    """Both share a layout, whose tiles must suit both."""
    gate_up, down = jnp.asarray(normal(3, 2, 64, 2, 256, size=0.1), "bfloat16"), normal(4, 2, 256, 64, size=0.1)
    down = quantize(jnp.asarray(down, "bfloat16"), "int4", batch=1, group_size=32)
    x, experts, weights = (
        normal(1, 90, 64).astype("bfloat16"),
        experts_of("even", 90, 1, 2),
        np.ones((90, 1), "float32"),
    )
    out = run("mosaic bfloat16", moe, x, experts, weights, gate_up, down)
    close(out, reference.moe(wide(x), experts, weights, wide(gate_up), wide(down)), "bfloat16")


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("xla float32", [3, 0, 4, 1]), ("xla float32", [0, 0, 0, 0]), ("xla float32", [0, 11, 0, 0]),
     ("xla bfloat16", [130, 0, 200, 5]), ("mosaic bfloat16", [3, 0, 4, 1]), ("mosaic bfloat16", [130, 0, 200, 5])],
)  # fmt: skip
def test_grouped_matmul(mode, sizes):
    """The rows past the last group hold NaN, and become zero."""
    dtype = mode.split()[1]
    rows = sum(sizes) + 2
    x, weight = normal(0, rows, 64).astype(dtype), jnp.asarray(normal(1, 4, 64, 2, 64), dtype)
    x[sum(sizes) :] = np.nan
    out = run(mode, grouped_matmul, jnp.asarray(x), weight, jnp.asarray(sizes, jnp.int32))
    expected = reference.grouped_matmul(wide(x), wide(weight), np.asarray(sizes))
    close(out, expected, dtype)
    assert not out[sum(sizes) :].any()


def test_grouped_matmul_quantized():
    weight = quantize(jnp.asarray(normal(1, 3, 64, 96)), "int8", batch=1)
    x, sizes = normal(0, 10, 64), np.asarray([4, 0, 6], np.int32)
    out = run("xla float32", grouped_matmul, x, weight, sizes)
    close(out, reference.grouped_matmul(x, wide(weight), sizes), "float32")


def test_results_do_not_depend_on_who_shares_the_batch():
    """Bit by bit in float32: alone, in crowds of any size, and whichever experts the others chose."""
    gate_up, down = normal(3, 4, 64, 2, 128, size=0.1), normal(4, 4, 128, 64, size=0.1)
    x, experts, weights = normal(1, 400, 64), experts_of("even", 400, 2, 4), np.abs(normal(2, 400, 2))
    everyone = run("xla float32", moe, x, experts, weights, gate_up, down)
    for first, last in [(0, 1), (7, 8), (3, 20), (399, 400), (100, 300)]:
        part = slice(first, last)
        some = run("xla float32", moe, x[part], experts[part], weights[part], gate_up, down)
        np.testing.assert_array_equal(some, everyone[part])


@pytest.mark.parametrize("choices", [1, 37, 512, 600])
@pytest.mark.parametrize("tile", [1, 8, 16])
def test_the_plan_lays_tokens_out_in_order(choices, tile):
    rng = np.random.default_rng(choices)
    experts = rng.integers(-1, 8, choices).astype(np.int32)
    experts[experts == 3] = 4
    layout = plan(jnp.asarray(experts), 7, tile)
    slots, sources = np.asarray(layout.slots), np.asarray(layout.sources)
    tile_experts, live = np.asarray(layout.tile_experts), int(layout.live[0])
    counts = [np.sum(experts == e) for e in range(7)]
    assert live == sum(-(-count // tile) for count in counts) <= layout.tiles == most_tiles(choices, 7, tile)
    np.testing.assert_array_equal(tile_experts[:live], np.repeat(np.arange(7), [-(-c // tile) for c in counts]))
    for expert in range(7):
        mine = np.flatnonzero(experts == expert)
        start = sum(-(-c // tile) for c in counts[:expert]) * tile
        np.testing.assert_array_equal(slots[mine], start + np.arange(len(mine)))
        np.testing.assert_array_equal(sources[slots[mine]], mine)
    assert (slots[(experts < 0) | (experts == 7)] == layout.rows).all()
    valid = experts[(experts >= 0) & (experts < 7)]
    ordered = plan_sorted(jnp.asarray(counts, jnp.int32), choices, tile)
    np.testing.assert_array_equal(np.sort(slots)[: len(valid)], np.asarray(ordered.slots)[: len(valid)])
    np.testing.assert_array_equal(ordered.tile_experts, tile_experts)


def test_the_worst_distribution_fits():
    for tile in (1, 8, 64):
        layout = plan(jnp.asarray([0, 1, 2, 3, 4, 4], jnp.int32), 5, tile)
        assert int(layout.live[0]) <= layout.tiles


def test_sizes_of_tiles():
    gate_up, down = jnp.zeros((8, 1, 1), jnp.bfloat16), quantize(jnp.zeros((8, 128, 1), jnp.bfloat16), "int4", batch=1)
    assert [config.row_tile(choices, 8, gate_up) for choices in (1, 16, 128, 400, 513)] == [8, 8, 32, 128, 128]
    assert [config.suits_prefill(choices, 8, gate_up) for choices in (512, 513)] == [False, True]
    assert config.row_tile(512, 8, gate_up, down) == 32
    assert not config.suits_prefill(9999, 8, gate_up, down)

    sizes = functools.partial(config.decode, dtype=jnp.bfloat16, cores=132)
    few = sizes(32, 128, gate_up, 4096, 14336, gated=True)
    assert (few.tile, few.consumers, few.depth, few.stages, few.splits) == (32, 2, 64, 6, 1)
    assert sizes(32, 128, gate_up, 14336, 4096, gated=False).splits == 1
    assert sizes(8, 2, gate_up, 14336, 4096, gated=False).splits == 2, "two experts alone do not keep 132 cores busy"
    assert sizes(8, 2, gate_up, 2048, 768, gated=True).consumers == 1
    assert sizes(32, 128, gate_up, 2880, 2880, gated=True).consumers == 1
    assert [sizes(32, 128, down, inputs, 4096, gated=False).depth for inputs in (2048, 1920)] == [256, 128]
    assert [dataclasses.replace(few, consumers=n).registers for n in (1, 2, 3, 4)] == [None, 232, 152, 104]

    many = functools.partial(config.prefill, dtype=jnp.bfloat16, cores=132)
    assert many(14336, gated=True) == PrefillConfig(132, piece=128, stages=4, band=16)
    assert many(4096, gated=False).piece == 256
    for width in (64, 192, 320, 512, 2880):
        assert width % many(width, gated=True).piece == 0
        assert width % many(width, gated=False).piece == 0


def shapes(**change):
    default = {"x": (6, 64), "experts": (6, 2), "weights": (6, 2), "gate_up": (4, 64, 2, 128), "down": (4, 128, 64)}
    dtypes = {"experts": jnp.int32, "weights": jnp.float32}
    arrays = {
        name: jnp.zeros(change.get(name, shape), dtypes.get(name, jnp.bfloat16)) for name, shape in default.items()
    }
    return arrays | {name: jnp.zeros(change[name]) for name in change if name.endswith("_bias")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": (5, 2)}, r"experts has shape \(5, 2\); it must be \[6, any\]"),
        ({"weights": (6, 3)}, r"weights has shape \(6, 3\); it must be \[6, 2\]"),
        ({"gate_up": (4, 32, 2, 128)}, r"gate_up has shape \(4, 32, 2, 128\); it must be \[experts, 64, 2, mlp\]"),
        ({"gate_up": (4, 64, 256)}, r"gate_up has shape \(4, 64, 256\); it must be \[experts, 64, 2, mlp\]"),
        ({"down": (4, 64, 128)}, r"down has shape \(4, 64, 128\); it must be \[4, 128, 64\]"),
        ({"gate_up_bias": (4, 128)}, r"gate_up_bias has shape \(4, 128\); it must be \[4, 2, 128\]"),
        ({"down_bias": (3, 64)}, r"down_bias has shape \(3, 64\); it must be \[4, 64\]"),
    ],
)
def test_shapes_that_disagree(change, message):
    with pytest.raises(ValueError, match=message):
        moe(**shapes(**change))


def test_errors():
    with pytest.raises(ValueError, match="there is no activation 'tanh'; there are: silu, gelu, gelu_tanh, relu"):
        moe(**shapes(), activation="tanh")
    with pytest.raises(ValueError, match=r"the kernel of moe cannot run: it is written for Hopper GPUs .* a CPU"):
        moe(**shapes(), implementation="mosaic")
    with pytest.raises(ValueError, match=r"x has shape \(6, 32\); it must be \[any, 64\]"):
        grouped_matmul(jnp.zeros((6, 32)), jnp.zeros((4, 64, 8)), jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match=r"group_sizes has shape \(5,\); it must be \[4\]"):
        grouped_matmul(jnp.zeros((6, 64)), jnp.zeros((4, 64, 8)), jnp.zeros(5, jnp.int32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": jnp.zeros((6, 64))}, "it multiplies bfloat16 or float16, and x is float32"),
        ({"down": jnp.zeros((4, 128, 64))}, "it multiplies bfloat16 by itself or by 8 and 4 bits, not by float32"),
        (
            {"gate_up": quantize(jnp.zeros((4, 64, 2, 128)), "int8", batch=1)},
            "it needs inputs that 128 divides and outputs that 64 divides, not 64 and 128",
        ),
        (
            {"gate_up": jnp.zeros((4, 64, 2, 72), jnp.bfloat16), "down": jnp.zeros((4, 72, 64), jnp.bfloat16)},
            "it needs inputs that 64 divides and outputs that 64 divides, not 64 and 72",
        ),
    ],
)
def test_why_the_kernel_does_not_run(change, reason):
    with pytest.raises(ValueError, match=f"the kernel of moe cannot run: {reason}"):
        moe(**shapes() | change, target=H200, implementation="mosaic")


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels.choice"):
        moe(**shapes(gate_up=(4, 64, 2, 24), down=(4, 24, 64)), target=CPU)
        moe(**shapes(gate_up=(4, 64, 2, 40), down=(4, 40, 64)), target=H200)
    assert "moe runs on XLA: it needs inputs that 64 divides and outputs that 64 divides, not 64 and 40" in caplog.text
