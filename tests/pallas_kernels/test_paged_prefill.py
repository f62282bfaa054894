"""paged_prefill: every implementation computes what the reference says, and reads nothing else."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill, reference, xla
from pallas_kernels.target import H200
from pallas_kernels.tiles import CPU
from tests.pallas_kernels.paged_cases import Layout, make_cache, normal, tolerance

IMPLEMENTATIONS = ["reference", "xla", "xla_small_blocks"]
SMALL = Layout(head_dim=64, kv_heads=2, q_per_kv=3, page_size=4, width=9)

# Small blocks and chunks take the loops of the portable version round several times, also on short sequences.
JITTED = {
    "xla": jax.jit(
        functools.partial(paged_prefill, implementation="xla"),
        static_argnames=("scale", "causal", "window", "chunk", "soft_cap"),
    ),
    "xla_small_blocks": jax.jit(
        functools.partial(xla.paged_prefill, tiles=dataclasses.replace(CPU, prefill_rows=8, prefill_keys=32)),
        static_argnames=("scale", "causal", "window", "chunk", "soft_cap"),
    ),
}


def starts(chunks, batch):
    """query_start of (count, length) chunks, padded to `batch` sequences."""
    counts = [count for count, _ in chunks] + [0] * (batch - len(chunks))
    return np.cumsum([0, *counts], dtype=np.int32)


def attend(implementation, q, cache, chunks, layout, dtype="float32", pages=None, **options):
    """chunks: (count, length) of each sequence; sequences past them are padding. pages: if not in `dtype`."""
    batch = len(cache.tables)
    lengths = np.asarray([length for _, length in chunks] + [0] * (batch - len(chunks)), np.int32)
    ids = (cache.tables, starts(chunks, batch), lengths)
    options |= {"scale": layout.scale, "window": layout.window}
    if implementation == "reference":
        return reference.paged_prefill(q, pages or cache.pages(), *ids, **options)
    out = JITTED[implementation](q.astype(dtype), pages or cache.pages(dtype), *ids, **options)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def make(layout, chunks, tokens, batch, seed):
    """A cache and queries; the rows of no sequence are NaN."""
    cache = make_cache(layout, [n for _, n in chunks] + [0] * (batch - len(chunks)), seed)
    q = normal(np.random.default_rng(seed + 50), tokens, layout.kv_heads, layout.q_per_kv, layout.head_dim)
    q[sum(count for count, _ in chunks) :] = np.nan
    return q, cache


def ladder(layout):
    """Whole prompts at every edge, a chunk at depth, a sequence that brings no row, one token of a long sequence."""
    page, most = layout.page_size, layout.capacity
    whole = [(n, n) for n in (1, page - 1, page, page + 1)]
    return [*whole, (0, 5), (3, most), (9, most - 1), (1, most // 2), (0, 0), (page + 2, 2 * page + 3)]


# Every head_dim, group size and page size, windows of one token, of a page, and of neither.
CASES = [
    (Layout(64, 1, 1, page_size=4, width=9), 48, "xla"),
    (Layout(80, 2, 3, page_size=16, width=4), 96, "xla_small_blocks"),
    (Layout(96, 3, 4, page_size=16, width=5, window=16), 96, "xla_small_blocks"),
    (Layout(128, 1, 7, page_size=4, width=12, window=1), 48, "xla_small_blocks"),
    (Layout(256, 2, 4, page_size=4, width=10, window=7), 48, "xla_small_blocks"),
]


@pytest.mark.parametrize(("layout", "tokens", "implementation"), CASES)
def test_equals_the_reference(layout, tokens, implementation):
    most = layout.capacity
    batches = [ladder(layout), [(tokens - 1 - most // 2, most), (most // 2, most // 2)], [(1, 1)]]
    for seed, chunks in enumerate(batches):
        chunks = [(min(count, length), length) for count, length in chunks]
        q, cache = make(layout, chunks, tokens, 12, seed)
        out, want = (attend(name, q, cache, chunks, layout) for name in (implementation, "reference"))
        assert np.isfinite(want).all()
        np.testing.assert_allclose(out, want, **tolerance("float32", layout.head_dim))
        rows = sum(count for count, _ in chunks)
        assert np.any(out[:rows], axis=(1, 2, 3)).all()
        assert not out[rows:].any()


@pytest.mark.parametrize("window", [None, 300, 64])
def test_long_sequences_take_several_blocks_and_chunks(window):
    """More than 64 rows and 256 keys: what the sizes of the public function loop over, ends on no multiple."""
    layout = Layout(64, 1, 1, page_size=64, width=9, window=window)
    chunks = [(3, 3), (130, 515), (2, 576), (65, 65)]
    q, cache = make(layout, chunks, 256, 4, seed=0)
    out, want = (attend(name, q, cache, chunks, layout) for name in ("xla", "reference"))
    np.testing.assert_allclose(out, want, **tolerance("float32", 64))


@pytest.mark.parametrize("implementation", ["xla", "xla_small_blocks"])
def test_bidirectional_rows_see_all_of_their_sequence(implementation):
    """What follows them too, in every block of rows; and nothing past its end, or of another."""
    chunks = [(30, 30), (1, 1), (0, 9), (5, 36), (8, 8)]
    q, cache = make(SMALL, chunks, 48, 6, seed=3)
    out, want = (attend(name, q, cache, chunks, SMALL, causal=False) for name in (implementation, "reference"))
    np.testing.assert_allclose(out, want, **tolerance("float32", SMALL.head_dim))
    assert not out[44:].any()


def test_bidirectional_attention_has_no_window():
    q, cache = make(SMALL, [(3, 3)], 8, 1, seed=0)
    with pytest.raises(ValueError, match="windows, chunks and ALiBi look back only; they go with causal=True"):
        attend("xla", q, cache, [(3, 3)], dataclasses.replace(SMALL, window=4), causal=False)


def test_bfloat16_inputs_are_summed_in_float32():
    layout = Layout(128, 2, 4, page_size=16, width=16, window=None)
    chunks = [(20, 256), (30, 30)]
    q, cache = make(layout, chunks, 64, 2, seed=0)
    rounded = type(cache)(*(np.asarray(jnp.bfloat16(x), np.float32) for x in (cache.k, cache.v)), cache.tables)
    want = attend("reference", np.asarray(jnp.bfloat16(q), np.float32), rounded, chunks, layout)
    out = attend("xla", q, cache, chunks, layout, dtype="bfloat16")
    np.testing.assert_allclose(out, want, **tolerance("bfloat16", 128))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_of_zeros_gives_the_mean_of_the_values_up_to_itself(implementation):
    chunks = [(5, 9), (13, 13), (1, 36)]
    q, cache = make(SMALL, chunks, 24, 4, seed=1)
    q[:19] = 0.0
    out = attend(implementation, q, cache, chunks, SMALL)
    row = 0
    for number, (count, length) in enumerate(chunks):
        values = cache.v[cache.tables[number]].transpose(0, 2, 1, 3).reshape(36, 2, 64)
        for position in range(length - count, length):
            mean = values[: position + 1].mean(0)
            np.testing.assert_allclose(out[row], np.broadcast_to(mean[:, None], (2, 3, 64)), rtol=1e-5, atol=1e-6)
            row += 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prompt_in_chunks_equals_the_prompt_whole(implementation):
    """The same keys are read in the same order, so in float32 only the blocks' shapes may move a bit."""
    q, cache = make(SMALL, [(23, 23)], 24, 4, seed=2)
    whole = attend(implementation, q, cache, [(23, 23)], SMALL)
    for first in (1, 4, 11, 22):
        part = np.full_like(q, np.nan)
        part[: 23 - first] = q[first:23]
        out = attend(implementation, part, cache, [(23 - first, 23)], SMALL)
        np.testing.assert_allclose(out[: 23 - first], whole[first:23], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_be_shared_and_lie_anywhere(implementation):
    chunks = [(6, 20), (6, 18), (7, 30)]
    q, cache = make(SMALL, chunks, 24, 4, seed=3)
    cache.tables[1] = cache.tables[0]
    q[6:12] = q[:6]
    out = attend(implementation, q, cache, chunks, SMALL)
    alone = attend(implementation, q, cache, [(6, 18)], SMALL)
    np.testing.assert_array_equal(out[6:12], alone[:6])
    assert np.abs(out[6:12] - out[:6]).max() > 1e-3

    order = np.random.default_rng(4).permutation(len(cache.k))
    moved = type(cache)(cache.k[order], cache.v[order], np.argsort(order).astype(np.int32)[cache.tables])
    np.testing.assert_array_equal(attend(implementation, q, moved, chunks, SMALL), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (8, 3, 3, 64)}, r"q has shape \(8, 3, 3, 64\); it must be \[any, 2, any, 64\]"),
        ({"v": (6, 2, 4, 64)}, r"v has shape \(6, 2, 4, 64\); it must be \[5, 2, 4, 64\]"),
        ({"alibi_slopes": (3,)}, r"alibi_slopes has shape \(3,\); it must be \[2, 3\]"),
        ({"sinks": (3,)}, r"sinks has shape \(3,\); it must be \[2, 3\]"),
        ({"block_tables": (3, 7)}, r"block_tables has shape \(3, 7\); it must be \[4, any\]"),
        ({"query_start": (4,)}, r"query_start has shape \(4,\); it must be \[5\]"),
        ({"window": -3}, "window is -3; it must be at least 1 token, or None for all"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1 token, or None for all"),
        (
            {"implementation": "mosaic"},
            "the kernel of paged_prefill cannot run: .* this is a CPU; use implementation='xla'",
        ),
    ],
)
def test_errors(change, message):
    shapes = {"q": (8, 2, 3, 64), "k": (5, 2, 4, 64), "v": (5, 2, 4, 64), "sinks": (2, 3)}
    shapes["alibi_slopes"] = (2, 3)
    ids = {"block_tables": (4, 7), "query_start": (5,), "lengths": (4,)}
    options = {name: value for name, value in change.items() if name not in shapes | ids}
    arrays = {name: jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    arrays |= {name: jnp.zeros(change.get(name, shape), jnp.int32) for name, shape in ids.items()}
    pages = KVPages(arrays.pop("k"), arrays.pop("v"))
    with pytest.raises(ValueError, match=message):
        paged_prefill(pages=pages, **arrays, scale=1.0, **options)


@pytest.mark.parametrize(
    "options", [{"soft_cap": 0.5}, {"alibi": True}, {"soft_cap": 2.0, "sinks": True, "alibi": True}], ids=str
)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_options_and_cache_dtypes(options, window, dtype):
    layout = dataclasses.replace(SMALL, window=window)
    chunks = [(5, 9), (13, 13), (1, 36), (0, 4)]
    q, cache = make(layout, chunks, 24, 4, seed=5)
    sinks = normal(np.random.default_rng(6), 2, 3) if "sinks" in options else None
    slopes = np.abs(normal(np.random.default_rng(7), 2, 3)) if "alibi" in options else None
    extra = {"soft_cap": options.get("soft_cap"), "sinks": sinks, "alibi_slopes": slopes, "pages": cache.pages(dtype)}
    out, want = (attend(name, q, cache, chunks, layout, **extra) for name in ("xla_small_blocks", "reference"))
    assert np.isfinite(want).all()
    np.testing.assert_allclose(out, want, **tolerance("float32", 64))


@pytest.mark.parametrize("chunk", [5, 8])
@pytest.mark.parametrize("implementation", ["reference", "xla_small_blocks"])
def test_attention_within_chunks(implementation, chunk):
    """A query's own chunk is all there is: of pages of 4 that end with a chunk or within it, of sequences that do. What
    no query of a sequence sees is gone."""
    chunks, lengths = [(36, 36), (3, 8), (1, 26), (5, 9), (1, 5), (6, 30)], [36, 8, 26, 9, 5, 30]
    q, cache = make(SMALL, chunks, 54, 7, seed=8)
    want = np.zeros(q.shape, np.float32)
    row = 0
    for number, (count, length) in enumerate(chunks):
        keys, values = (x[cache.tables[number]].transpose(1, 0, 2, 3).reshape(2, 36, 64) for x in (cache.k, cache.v))
        for position in range(length - count, length):
            seen = slice(position - position % chunk, position + 1)
            scores = np.einsum("hqd,hkd->hqk", q[row], keys[:, seen]) * SMALL.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            want[row] = np.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), values[:, seen])
            row += 1
        first = length - count - (length - count) % chunk
        cache.tables[number, : first // 4] = cache.tables[6, 0]  # a page of NaN
    assert row == 52
    out = attend(implementation, q, cache, chunks, SMALL, chunk=chunk)
    np.testing.assert_allclose(out, want, **tolerance("float32", 64))
    singles = [i for i, (count, _) in enumerate(chunks) if count == 1]  # decode says the same
    rows = np.cumsum([count for count, _ in chunks])[singles] - 1
    ids = (cache.tables[singles], np.asarray(lengths, np.int32)[singles])
    decoded = paged_decode(jnp.asarray(q[rows]), cache.pages(), *ids, scale=SMALL.scale, chunk=chunk)
    np.testing.assert_allclose(decoded, want[rows], **tolerance("float32", 64))


def test_the_kernels_refuse_alibi_and_chunks():
    pages = KVPages(*(jnp.zeros((5, 2, 16, 64), jnp.bfloat16),) * 2)
    ids = {"block_tables": jnp.zeros((1, 2), jnp.int32), "lengths": jnp.ones(1, jnp.int32)}
    refused = [({"alibi_slopes": jnp.ones((2, 3))}, "adds no ALiBi"), ({"chunk": 9}, "knows windows, not chunks")]
    for extra, why in refused:
        options = {"scale": 1.0, "target": H200, "implementation": "mosaic", **extra}
        with pytest.raises(ValueError, match=f"kernel of paged_prefill cannot run: it {why}"):
            paged_prefill(jnp.zeros((1, 2, 3, 64), jnp.bfloat16), pages, query_start=jnp.arange(2), **ids, **options)
        with pytest.raises(ValueError, match=f"kernel of paged_decode cannot run: it {why}"):
            paged_decode(jnp.zeros((1, 2, 3, 64), jnp.bfloat16), pages, **ids, **options)
