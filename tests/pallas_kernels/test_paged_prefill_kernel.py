"""The Hopper kernel of paged_prefill, interpreted with race detection, and the tiles it is given."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_prefill import config, make_plan, paged_prefill, reference
from pallas_kernels.target import CPU, H200, HOPPER, Target
from tests.pallas_kernels.interpreter import interpreter
from tests.pallas_kernels.paged_cases import Layout, make_cache, normal

TWO_CORES = Target("gpu", HOPPER, 2)
"""Fewer blocks than tiles: each works through several."""
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "int8": 6e-3, "float8_e4m3fn": 6e-3}
"""Of the norm of a row: q, weights, widened keys and values, and the output have 8 bits, or 11 with float16."""

# Cache, layout, (count, length) of each sequence, soft cap, sinks. Rows past the last sequence stay free.
# "Bidirectional" sees all of a sequence, also what follows; several tiles of one, and a tile shorter than its keys.
CASES = {
    "bf16": ("bfloat16", Layout(128, 2, 4, 64, 5), [(5, 9), (40, 200), (0, 7), (1, 300), (65, 65)], None, False),
    "f16, short window": ("float16", Layout(64, 1, 1, 16, 20, window=20), [(40, 200), (70, 70)], None, False),
    "page edges": ("bfloat16", Layout(64, 1, 8, 32, 4), [(1, 1), (31, 31), (32, 32), (33, 33), (2, 128)], None, False),
    "int8, short pages": ("int8", Layout(80, 1, 1, 16, 7), [(40, 100), (17, 17), (1, 16), (0, 3)], None, False),
    "int8, sinks": ("int8", Layout(64, 1, 2, 64, 4), [(70, 200), (0, 7), (1, 130)], None, True),
    "fp8, capped": ("float8_e4m3fn", Layout(80, 1, 16, 32, 5, window=100), [(9, 150), (3, 17)], 2.0, True),
    "half pages": ("bfloat16", Layout(256, 1, 2, 128, 2, window=150), [(30, 250), (5, 5)], 1.0, False),
    "odd group": ("int8", Layout(192, 1, 3, 32, 3), [(20, 90)], None, False),
    "96 dimensions": ("bfloat16", Layout(96, 1, 6, 32, 5), [(50, 140)], None, True),
    "bidirectional": ("bfloat16", Layout(64, 1, 1, 64, 3), [(150, 150), (0, 0), (64, 64), (5, 130)], None, False),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    """And reads nothing that is not a token: every other slot is NaN, and the rows of no sequence."""
    dtype, layout, chunks, soft_cap, sinks = CASES[name]
    counts, lengths = (np.asarray(x, np.int32) for x in zip(*chunks, strict=True))
    starts = np.append(0, np.cumsum(counts)).astype(np.int32)
    tokens = int(starts[-1]) + 17
    cache = make_cache(layout, lengths.tolist(), seed=0)
    pages = cache.pages(dtype)
    q_dtype = "float16" if dtype == "float16" else "bfloat16"
    rng = np.random.default_rng(1)
    q = normal(rng, tokens, layout.kv_heads, layout.q_per_kv, layout.head_dim)
    q[starts[-1] :] = np.nan
    q = np.asarray(q.astype(q_dtype))
    sink = normal(rng, layout.kv_heads, layout.q_per_kv) + 1 if sinks else None
    options = {"scale": layout.scale, "window": layout.window, "soft_cap": soft_cap, "sinks": sink}
    options["causal"] = name != "bidirectional"

    with interpreter() as interpret:
        ids = [jnp.asarray(x) for x in (cache.tables, starts, lengths)]
        arrays = jnp.asarray(q), jax.tree.map(jnp.asarray, pages), *ids
        kernel = {"target": TWO_CORES, "implementation": "mosaic", "interpret": interpret}
        out = np.asarray(paged_prefill(*arrays, **options, **kernel), np.float32)

    want = reference.paged_prefill(q.astype(np.float32), pages, cache.tables, starts, lengths, **options)
    assert np.isfinite(want).all()
    error = np.linalg.norm(out - want, axis=-1)
    np.testing.assert_array_less(error[: starts[-1]], TOLERANCE[dtype] * np.linalg.norm(want, axis=-1)[: starts[-1]])
    assert not out[starts[-1] :].any()


def test_plan_covers_each_row_once_longest_tiles_first():
    counts, lengths = [70, 0, 1, 32, 5], [70, 9, 500, 32, 100]
    starts = jnp.cumsum(jnp.asarray([0, *counts]))
    plan = make_plan(starts, jnp.asarray(lengths), tokens=128, q_per_kv=4)
    assert plan.tile_tokens == 32
    assert plan.tiles.shape == (128 // 32 + 5 + 1, 5)
    tiles = np.asarray(plan.tiles)[: int(plan.count[0])]
    seen = np.zeros(128, int)
    for sequence, row, position, rows, length in tiles:
        seen[row : row + rows] += 1
        assert 1 <= rows <= 32
        if sequence == 5:  # the rows of no sequence see no key
            assert (row >= 108, position + rows, length) == (True, 0, 0)
            continue
        assert length == lengths[sequence]
        assert position == lengths[sequence] - counts[sequence] + row - starts[sequence]
    assert (seen == 1).all()
    ends = tiles[:, 2] + tiles[:, 3]
    assert (np.diff(ends) <= 0).all()
    assert ends[0] == 500


def test_a_plan_of_nothing_and_one_that_is_full():
    empty = make_plan(jnp.zeros(4, jnp.int32), jnp.zeros(3, jnp.int32), tokens=64, q_per_kv=1)
    assert int(empty.count[0]) == 1
    assert np.asarray(empty.tiles)[0].tolist() == [3, 0, -64, 64, 0]
    ones = make_plan(jnp.arange(65), jnp.full(64, 3), tokens=64, q_per_kv=1)
    assert int(ones.count[0]) == 64
    assert (np.asarray(ones.tiles)[:64, 3] == 1).all()


def arguments(**change):
    """Abstract arguments of a small call, some changed."""
    sizes = {"q": jnp.bfloat16, "cache": jnp.bfloat16, "page_size": 64, "head_dim": 128, "v_transposed": False} | change
    array = jax.ShapeDtypeStruct
    rows = (9, 2, sizes["page_size"], sizes["head_dim"])
    scales = array(rows[:3], jnp.float32) if jnp.dtype(sizes["cache"]).itemsize == 1 else None
    k, turned = array(rows, sizes["cache"]), sizes["v_transposed"]
    v = array((*rows[:2], rows[3], rows[2]), sizes["cache"]) if turned else k
    cache = KVPages(k, v, scales, scales, v_transposed=turned)
    ids = [array(shape, jnp.int32) for shape in ((1, 3), (2,), (1,))]
    return array((256, 2, 4, sizes["head_dim"]), sizes["q"]), cache, *ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.float32}, "q is float32, and matrix units take bfloat16 or float16"),
        ({"q": jnp.float16}, "the cache is bfloat16 and q is float16"),
        ({"cache": jnp.int8}, "the 8-bit values have head_dim innermost"),
        ({"page_size": 8}, r"a page holds 8 tokens, and the kernel reads pages of \(16, 32, 64, 128\)"),
        ({"head_dim": 112}, r"head_dim is 112, and the kernel is built for \(64, 80, 96, 128, 192, 256\)"),
        ({}, "this is a CPU"),
    ],
)
def test_says_why_it_cannot_run(change, message):
    target = H200 if change else CPU

    def call(*arrays):
        return paged_prefill(*arrays, scale=1.0, target=target, implementation="mosaic")

    with pytest.raises(ValueError, match=f"the kernel of paged_prefill cannot run: .*{message}"):
        jax.eval_shape(call, *arguments(**change))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_warpgroups_do_not_wait_for_registers_that_nobody_gives_up(head_dim, dtype):
    """65536 registers over 384 threads are 168 each, in eights; what one warpgroup has more, others have less."""
    chosen = config.choose(4, head_dim, jnp.dtype(dtype))
    assert 2 * chosen.consumer_registers + chosen.producer_registers <= 3 * 168
    with pytest.raises(ValueError, match="take 512 registers of 504: the kernel would not start"):
        dataclasses.replace(chosen, consumer_registers=232, producer_registers=48)
