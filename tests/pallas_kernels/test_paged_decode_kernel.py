"""The Hopper kernel of paged_decode, interpreted with race detection, and its division of work."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pages import abstract_pages
from pallas_kernels.paged_decode import make_plan, obstacle, paged_decode, reference
from pallas_kernels.paged_decode.config import choose
from pallas_kernels.paged_decode.plan import divide
from pallas_kernels.target import CPU, H200
from tests.pallas_kernels.interpreter import interpreter
from tests.pallas_kernels.paged_cases import Layout, make_cache, normal

TOLERANCE = {"bfloat16": 3e-3, "float16": 6e-4, "int8": 3e-3, "float8_e4m3fn": 4e-3}
"""Of the norm of the output: q and the output have 8 bits with bfloat16 and the 8-bit caches."""


def check(dtype, layout, lengths, blocks, *, queries=1, soft_cap=None, sinks=False, scale=1.0):
    """Against the reference, relative to the norm of each sequence's output. blocks: the work is divided over."""
    rng = np.random.default_rng(len(lengths))
    cache = make_cache(layout, lengths, seed=blocks)
    if layout.window is not None:  # what no query sees any more may have been given away
        for row, length in enumerate(lengths):
            for position in range(length - queries + 1 - layout.window):
                page, slot = cache.tables[row, position // layout.page_size], position % layout.page_size
                cache.k[page, :, slot] = cache.v[page, :, slot] = np.nan
    pages = cache.pages(dtype)
    shape = (len(lengths), queries, layout.kv_heads, layout.q_per_kv, layout.head_dim)
    q = jnp.asarray(normal(rng, *shape) * scale, "float16" if dtype == "float16" else "bfloat16")
    options = {
        "scale": layout.scale,
        "window": layout.window,
        "soft_cap": soft_cap,
        "sinks": normal(rng, *shape[2:4]) + 1 if sinks else None,
    }
    target = dataclasses.replace(H200, cores=blocks)
    with interpreter() as interpret:
        out = paged_decode(
            q,
            jax.tree.map(jnp.asarray, pages),
            jnp.asarray(cache.tables),
            jnp.asarray(lengths, jnp.int32),
            target=target,
            implementation="mosaic",
            interpret=interpret,
            **options,
        )
        out = np.asarray(out, np.float32)
    want = reference.paged_decode(np.asarray(q, np.float32), pages, cache.tables, np.asarray(lengths), **options)
    assert np.isfinite(want).all()
    for row, length in enumerate(lengths):
        error, norm = np.linalg.norm(out[row] - want[row]), np.linalg.norm(want[row])
        assert error <= TOLERANCE[dtype] * norm, (row, length, error / max(norm, 1e-30))


CASES = [
    # Every head_dim and page size, lengths at the edges of pages and tiles, rows that blocks share, idle blocks.
    ("bfloat16", Layout(128, 2, 4, page_size=64, width=3), [130, 1, 0, 64], 1, {}),
    ("float16", Layout(64, 1, 1, page_size=16, width=7, window=37), [100, 17, 0, 15, 64], 1, {}),
    ("bfloat16", Layout(80, 1, 3, page_size=32, width=5), [129, 31], 1, {"soft_cap": 2.0, "sinks": True}),
    ("bfloat16", Layout(96, 1, 12, page_size=128, width=2), [129, 128], 2, {}),
    ("bfloat16", Layout(192, 1, 16, page_size=64, width=1), [10], 1, {}),
    ("float16", Layout(256, 1, 2, page_size=64, width=3, window=1), [65, 64], 1, {"queries": 2}),
    ("int8", Layout(128, 1, 4, page_size=64, width=3, window=70), [190, 64, 0], 1, {}),
    ("int8", Layout(64, 2, 2, page_size=32, width=4), [100, 65], 1, {"queries": 3, "sinks": True}),
    ("int8", Layout(96, 1, 4, page_size=128, width=2), [150], 1, {"scale": 30.0}),
    ("float8_e4m3fn", Layout(64, 1, 5, page_size=32, width=5), [129, 3], 1, {"queries": 8, "soft_cap": 3.0}),
    ("float8_e4m3fn", Layout(80, 1, 4, page_size=16, width=5), [65, 1, 0, 15, 17], 1, {}),
    ("int8", Layout(80, 1, 2, page_size=128, width=2, window=90), [150, 128], 1, {"queries": 2}),
    ("int8", Layout(64, 2, 1, page_size=16, width=7, window=20), [100, 16, 33], 2, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].head_dim}-{case[1].page_size}")
def test_equals_the_reference(case):
    dtype, layout, lengths, blocks, options = case
    check(dtype, layout, lengths, blocks, **options)


def test_more_sequences_than_the_ring_holds():
    """Each block has many rows of one tile; q and pages of later ones arrive while earlier ones are computed."""
    check("bfloat16", Layout(64, 1, 4, page_size=64, width=1), [5, 64, 0, 1, 63, 20, 0, 33, 2], 1)


def test_small_weights_count_beside_a_large_one():
    """A key has 10^5 times the weight of the others, and a value in one dimension: the rest is what the others give.

    Weights relative to the largest of all, not to that of their page, would all round to 0 in 8 bits.
    """
    layout, length = Layout(64, 1, 1, page_size=64, width=4), 256
    cache = make_cache(layout, [length], seed=0)
    q = np.zeros((1, 1, 1, 64), np.float32)
    q[..., 0] = 1
    first = cache.tables[0, 0]
    cache.k[..., 0] = 0.0
    cache.k[first, 0, 0] = 0.0
    cache.k[first, 0, 0, 0] = np.log(1e5) / layout.scale
    cache.v[first] = 0.0
    cache.v[first, 0, 0, 0] = 1.0
    pages = cache.pages("int8")
    with interpreter() as interpret:
        out = paged_decode(
            jnp.asarray(q, jnp.bfloat16),
            jax.tree.map(jnp.asarray, pages),
            jnp.asarray(cache.tables),
            jnp.asarray([length], jnp.int32),
            scale=layout.scale,
            target=dataclasses.replace(H200, cores=1),
            implementation="mosaic",
            interpret=interpret,
        )
        out = np.asarray(out, np.float32)
    want = reference.paged_decode(q, pages, cache.tables, np.asarray([length]), scale=layout.scale)
    out, want = out[..., 1:], want[..., 1:]
    assert np.linalg.norm(out - want) <= 5e-3 * np.linalg.norm(want)


def covered(plan, tiles):
    """How often each (sequence, head tile, tile) is in a block's run, by walking as the kernel does."""
    counts = {}
    sequences = np.asarray(plan.sequences)
    for run in np.asarray(plan.runs):
        sequence, head, at, count, rows = run[:5]
        seen = set()
        for _ in range(count):
            counts[sequence, head, at] = counts.get((sequence, head, at), 0) + 1
            seen.add((sequence, head))
            at += 1
            if at == tiles[sequence]:
                at, head = 0, head + 1
                if head == plan.config.head_tiles:
                    sequence, head = sequences[sequence, 3], 0
        assert len(seen) == rows
    return counts


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cores", [1, 7, 132])
def test_the_plan_covers_every_tile_once(window, cores):
    """And its blocks' shares differ by one tile at most; each knows where all parts of its rows are."""
    rng = np.random.default_rng(cores)
    for lengths in ([0, 0], [1], [5000, 0, 1, 64, 65, 0, 300], rng.integers(0, 700, 70).tolist(), [0, 128, 0]):
        pages = abstract_pages(1, 2, 64, 128, "bfloat16")
        config = choose(1, 4, pages, dataclasses.replace(H200, cores=cores))
        tables = rng.permutation(len(lengths) * 80).reshape(-1, 80).astype(np.int32)
        plan = divide(jnp.asarray(lengths, jnp.int32), jnp.asarray(tables), config, window)
        first = [0 if window is None else max(0, length - window) // 64 for length in lengths]
        tiles = [-(-length // 64) - f if length else 0 for length, f in zip(lengths, first, strict=True)]
        want = {(s, h, t): 1 for s, n in enumerate(tiles) for h in range(2) for t in range(n)}
        assert covered(plan, tiles) == want
        runs = np.asarray(plan.runs)
        busy = runs[runs[:, 3] > 0, 3]
        assert np.ptp(busy if busy.size else [0]) <= 1
        for run, found in zip(runs, np.asarray(plan.pages), strict=True):
            sequence, head, at, count = run[:4]
            loaded = list(want)[list(want).index((sequence, head, at)) :] if count else []
            for (s, _, t), page in zip(loaded[:count], found[:, 0], strict=False):
                assert page == tables[s, first[s] + t]
        order = [(s, h) for s, h, t in want if t == 0]
        parts = {}  # slots, in order
        for block, (sequence, head, at, count, rows) in enumerate(runs[:, :5]):
            start, stop = order.index((sequence, head)) if count else 0, at + count
            for turn, row in enumerate(order[start : start + rows]):
                n = tiles[row[0]]
                if (turn == 0 and at > 0) or stop < n:
                    parts.setdefault(row, []).append(2 * block + min(turn, 1))
                stop -= n
        for row, slots in parts.items():
            assert slots[1:] == [2 * (slots[0] // 2 + i) for i in range(1, len(slots))]
            for slot in slots:
                block, last = divmod(slot, 2)
                assert runs[block, [13 + last, 15 + last]].tolist() == [slots[0], len(slots)], row
        assert not runs[:, 17:].any()


@pytest.mark.parametrize(
    ("dtype", "length", "tiles", "busy"),
    [
        ("bfloat16", 640, 1, 80),  # a row of 10 tiles, 8 rows
        ("bfloat16", 8192, 8, 128),
        ("bfloat16", 131072, 64, 256),
        ("int8", 640, 1, 80),
        ("int8", 8192, 4, 256),
        ("int8", 131072, 32, 512),
    ],
)
def test_few_tiles_are_not_for_all_blocks(dtype, length, tiles, busy):
    """What another block would read sooner takes longer to merge."""
    config = choose(1, 4, abstract_pages(1, 8, 64, 128, dtype), H200)
    plan = divide(jnp.asarray([length], jnp.int32), jnp.zeros((1, 2048), jnp.int32), config, None)
    runs = np.asarray(plan.runs)
    assert (runs[:busy, 3] == tiles).all()
    assert not runs[busy:, 3].any()
    assert runs[0, 15] == busy // 8


def test_a_plan_for_other_shapes_is_refused():
    layout = Layout(64, 1, 2, page_size=64, width=1)
    pages = jax.tree.map(jnp.asarray, make_cache(layout, [3], 0).pages("bfloat16"))
    lengths, tables = jnp.asarray([3], jnp.int32), jnp.zeros((1, 1), jnp.int32)
    plan = make_plan(lengths, tables, pages, q_dtype=jnp.bfloat16, q_per_kv=2, window=5, target=H200)
    q = jnp.zeros((1, 1, 2, 64), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"plan is for .* = \(1, 1, 2, 1, 5\); the arguments have \(1, 1, 2, 1, None\)"
    ):
        paged_decode(q, pages, tables, lengths, scale=1.0, plan=plan, target=H200)


@pytest.mark.parametrize(
    ("dtype", "layout", "q_dtype", "reason"),
    [
        ("bfloat16", Layout(72, 1, 1, page_size=16, width=1), "bfloat16", "head_dim is 72"),
        ("bfloat16", Layout(64, 1, 1, page_size=8, width=1), "bfloat16", "page_size is 8"),
        ("bfloat16", Layout(64, 1, 1, page_size=16, width=1), "float32", "q is float32; it takes bfloat16 or float16"),
        ("float16", Layout(64, 1, 1, page_size=16, width=1), "bfloat16", "q is bfloat16 and the cache float16"),
    ],
)
def test_what_the_kernel_does_not_take(dtype, layout, q_dtype, reason):
    pages = make_cache(layout, [3], 0).pages(dtype)
    assert reason in obstacle(q_dtype, pages, H200)
    assert "CPU" in obstacle(q_dtype, pages, CPU)
    lengths, tables = jnp.asarray([3]), jnp.zeros((1, 1), jnp.int32)
    assert make_plan(lengths, tables, pages, q_dtype=q_dtype, q_per_kv=1, target=H200) is None
