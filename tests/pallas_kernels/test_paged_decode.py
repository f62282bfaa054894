"""paged_decode: every implementation computes what the reference says, and reads nothing else."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_decode import paged_decode, reference, xla
from pallas_kernels.tiles import CPU, GPU
from tests.pallas_kernels.paged_cases import Layout, make_cache, normal, tolerance

IMPLEMENTATIONS = ["reference", "xla"]
SMALL = Layout(head_dim=64, kv_heads=2, q_per_kv=3, page_size=4, width=7, window=None)

# (layout, pages_per_chunk): chunks of pages in a loop, tables that chunks do not divide, the whole table at once.
CASES = [
    (Layout(64, 1, 1, page_size=4, width=8), 2),
    (Layout(80, 2, 3, page_size=16, width=7), 3),
    (Layout(96, 3, 4, page_size=64, width=3), 3),
    (Layout(128, 1, 7, page_size=16, width=6, window=16), 1),
    (Layout(256, 2, 4, page_size=4, width=10, window=1), 4),
    (Layout(80, 1, 3, page_size=16, width=8, window=37), 2),
    (Layout(64, 3, 1, page_size=4, width=9, window=6), 9),
    (Layout(96, 1, 4, page_size=16, width=4, window=1000), 64),
    (Layout(64, 2, 2, page_size=16, width=5, window=21), -2),  # as on a GPU: whole tables
]


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "tiles"))
def jitted(q, *args, **options):
    single = q.ndim == 4
    out = xla.paged_decode(q[:, None] if single else q, *args, **options)
    return out[:, 0] if single else out


def attend(implementation, q, cache, lengths, layout, pages_per_chunk=2, dtype="float32", pages=None, **options):
    """pages: as stored, if not in `dtype`."""
    lengths = np.asarray(lengths, np.int32)
    options |= {"scale": layout.scale, "window": layout.window}
    if implementation == "reference":
        return reference.paged_decode(q, pages or cache.pages(), cache.tables, lengths, **options)
    args = (q.astype(dtype), pages or cache.pages(dtype), cache.tables, lengths)
    tiles = dataclasses.replace(
        CPU if pages_per_chunk > 0 else GPU, decode_keys=abs(pages_per_chunk) * layout.page_size
    )
    out = jitted(*args, tiles=tiles, **options)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def expected(q, cache, lengths, layout):
    return attend("reference", q, cache, lengths, layout)


def ladder(layout):
    """Lengths at every edge."""
    page, most = layout.page_size, layout.capacity
    return [0, 1, page - 1, page, page + 1, most // 2 + 1, most - 1, most]


@pytest.mark.parametrize(("layout", "pages_per_chunk"), CASES)
def test_equals_the_reference(layout, pages_per_chunk):
    """All lengths in a batch; then only long ones, so that a window lets the first pages be left out; then none."""
    most = layout.capacity
    for seed, lengths in enumerate([ladder(layout), [most, most - 1, most - 2, most] * 2, [1] * 8, [0] * 8]):
        cache = make_cache(layout, lengths, seed)
        q = normal(np.random.default_rng(seed + 10), 8, layout.kv_heads, layout.q_per_kv, layout.head_dim)
        out = attend("xla", q, cache, lengths, layout, pages_per_chunk)
        want = expected(q, cache, lengths, layout)
        assert np.isfinite(want).all()
        np.testing.assert_allclose(out, want, **tolerance("float32", layout.head_dim))
        for row, length in enumerate(lengths):
            assert np.any(out[row]) == (length > 0)


def test_bfloat16_inputs_are_summed_in_float32():
    layout = Layout(128, 2, 4, page_size=16, width=16)
    lengths = [256, 255, 100, 17]
    cache = make_cache(layout, lengths, seed=0)
    q = normal(np.random.default_rng(1), 4, 2, 4, 128)
    rounded = type(cache)(*(np.asarray(jnp.bfloat16(x), np.float32) for x in (cache.k, cache.v)), cache.tables)
    want = expected(np.asarray(jnp.bfloat16(q), np.float32), rounded, lengths, layout)
    out = attend("xla", q, cache, lengths, layout, dtype="bfloat16")
    np.testing.assert_allclose(out, want, **tolerance("bfloat16", 128))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_scores_give_the_mean_of_the_values(implementation):
    """A query of zeros weighs all keys alike, whatever they are."""
    lengths = [1, 5, 28, 13]
    cache = make_cache(SMALL, lengths, seed=2)
    out = attend(implementation, np.zeros((4, 2, 3, 64), np.float32), cache, lengths, SMALL)
    for row, length in enumerate(lengths):
        values = cache.v[cache.tables[row]].transpose(0, 2, 1, 3).reshape(28, 2, 64)[:length]
        for head in range(3):
            np.testing.assert_allclose(out[row, :, head], values.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_high_score_picks_its_value(implementation):
    """One key stands out by a score so large that exp of it overflows: the softmax must subtract the maximum."""
    cache = make_cache(SMALL, [28, 28, 28, 28], seed=3)
    q = np.zeros((4, 2, 3, 64), np.float32)
    q[..., 0] = 1e4
    cache.k[..., 0] = 0.0
    for row, position in enumerate([0, 4, 15, 27]):
        cache.k[cache.tables[row, position // 4], :, position % 4, 0] = 1.0
    out = attend(implementation, q, cache, [28] * 4, SMALL)
    for row, position in enumerate([0, 4, 15, 27]):
        value = cache.v[cache.tables[row, position // 4], :, position % 4]
        np.testing.assert_allclose(out[row], np.broadcast_to(value[:, None], (2, 3, 64)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_be_shared_and_lie_anywhere(implementation):
    """Two sequences with one prefix read the same pages; moving pages changes no bit."""
    lengths = [20, 18, 28, 0]
    cache = make_cache(SMALL, [20, 0, 28, 0], seed=4)
    cache.tables[1] = cache.tables[0]
    q = normal(np.random.default_rng(5), 4, 2, 3, 64)
    q[1] = q[0]
    out = attend(implementation, q, cache, lengths, SMALL)
    shorter = attend(implementation, q, cache, [18, 18, 28, 0], SMALL)
    np.testing.assert_array_equal(out[1], shorter[0])
    assert np.abs(out[1] - out[0]).max() > 1e-3

    order = np.random.default_rng(6).permutation(len(cache.k))
    moved = type(cache)(cache.k[order], cache.v[order], np.argsort(order).astype(np.int32)[cache.tables])
    np.testing.assert_array_equal(attend(implementation, q, moved, lengths, SMALL), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (4, 3, 3, 64)}, r"q has shape \(4, 1, 3, 3, 64\); it must be \[any, any, 2, any, 64\]"),
        ({"q": (4, 2, 3, 32)}, r"q has shape .*; it must be \[any, any, 2, any, 64\]"),
        ({"q": (4, 9, 2, 3, 64)}, "q has 9 queries a sequence; paged_decode takes 1 to 8, paged_prefill any"),
        ({"v": (5, 2, 8, 64)}, r"v has shape \(5, 2, 8, 64\); it must be \[5, 2, 4, 64\]"),
        ({"sinks": (2, 4)}, r"sinks has shape \(2, 4\); it must be \[2, 3\]"),
        ({"alibi_slopes": (3, 2)}, r"alibi_slopes has shape \(3, 2\); it must be \[2, 3\]"),
        ({"block_tables": (3, 7)}, r"block_tables has shape \(3, 7\); it must be \[4, any\]"),
        ({"lengths": (4, 1)}, r"lengths has shape \(4, 1\); it must be \[4\]"),
        ({"window": 0}, "window is 0; it must be at least 1 token, or None for all"),
        ({"implementation": "triton"}, "paged_decode has no implementation 'triton'; it has: mosaic, xla"),
        (
            {"implementation": "mosaic"},
            "the kernel of paged_decode cannot run: .* this is a CPU; use implementation='xla'",
        ),
    ],
)
def test_errors(change, message):
    shapes = {"q": (4, 2, 3, 64), "k": (5, 2, 4, 64), "v": (5, 2, 4, 64), "sinks": (2, 3)}
    shapes["alibi_slopes"] = (2, 3)
    ids = {"block_tables": (4, 7), "lengths": (4,)}
    options = {name: value for name, value in change.items() if name not in shapes | ids}
    arrays = {name: jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    arrays |= {name: jnp.zeros(change.get(name, shape), jnp.int32) for name, shape in ids.items()}
    pages = KVPages(arrays.pop("k"), arrays.pop("v"))
    with pytest.raises(ValueError, match=message):
        paged_decode(pages=pages, **arrays, scale=1.0, **options)


OPTIONS = [
    {"soft_cap": 0.5},
    {"sinks": True},
    {"soft_cap": 2.0, "sinks": True, "queries": 3},
    {"queries": 8},
    {"alibi": True, "soft_cap": 2.0, "queries": 3},
    {"alibi": True, "sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_options_and_cache_dtypes(options, window, dtype):
    """Several queries see each other causally; 8-bit pages are read as stored, by both alike."""
    layout = Layout(64, 2, 3, page_size=4, width=7, window=window)
    lengths = [28, 1, 9, 0, 16, 17]
    cache = make_cache(layout, lengths, seed=7)
    queries = options.get("queries", 1)
    rng = np.random.default_rng(8)
    shape = (6, queries, 2, 3, 64) if queries > 1 else (6, 2, 3, 64)
    q = normal(rng, *shape) * 3
    extra = {"soft_cap": options.get("soft_cap"), "sinks": normal(rng, 2, 3) if "sinks" in options else None}
    extra["alibi_slopes"] = np.abs(normal(rng, 2, 3)) if "alibi" in options else None
    stored = cache.pages(dtype)
    out = attend("xla", q, cache, lengths, layout, pages=stored, **extra)
    want = attend("reference", q, cache, lengths, layout, pages=stored, **extra)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(out, want, **tolerance("float32", 64))


def test_rows_of_v_or_columns():
    """8-bit values are stored either way; the result is the same to the bit."""
    cache = make_cache(SMALL, [28, 5, 17, 3], seed=9)
    q = normal(np.random.default_rng(10), 4, 2, 3, 64)
    either = [cache.pages("int8", v_transposed=turned) for turned in (False, True)]
    rows, columns = (attend("xla", q, cache, [28, 5, 17, 3], SMALL, pages=stored) for stored in either)
    np.testing.assert_array_equal(rows, columns)
