"""Chunks taken apart give the attention that chunks do, and read no other pages."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.chunks import chunks_apart
from pallas_kernels.paged_decode import reference as decode
from pallas_kernels.paged_prefill import reference as prefill
from tests.pallas_kernels.paged_cases import Layout, make_cache, normal

LAYOUT = Layout(head_dim=8, kv_heads=1, q_per_kv=2, page_size=4, width=9)
LENGTHS = [36, 8, 26, 9, 17, 0]


@pytest.mark.parametrize("chunk", [4, 8, 12, 64])
def test_the_same_attention(chunk):
    """Of prompts that start and end at a chunk's ends and within it, and that one chunk or many hold; padding last."""
    counts = [36, 3, 1, 5, 2, 0]
    start, lengths = np.cumsum([0, *counts], dtype=np.int32), np.asarray(LENGTHS, np.int32)
    cache = make_cache(LAYOUT, LENGTHS, seed=1)
    q = normal(np.random.default_rng(2), 47, 1, 2, 8)
    ids = (cache.tables, start, lengths)
    tables, rows, inside = map(np.asarray, chunks_apart(*ids, chunk=chunk, page_size=4, most=36))
    assert rows[-1] == 47
    assert inside.max() <= chunk
    assert tables.shape[1] == min(9, chunk // 4)
    want = prefill.paged_prefill(q, cache.pages(), cache.tables, start, lengths, scale=1.0, chunk=chunk)
    out = prefill.paged_prefill(q, cache.pages(), tables, rows, inside, scale=1.0)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("chunk", [4, 8])
def test_one_token_each(chunk):
    start, lengths = np.asarray([0, 1, 2, 3, 4, 5, 5], np.int32), np.asarray(LENGTHS, np.int32)
    cache = make_cache(LAYOUT, LENGTHS, seed=1)
    q = normal(np.random.default_rng(2), 6, 1, 2, 8)
    tables, _, inside = map(np.asarray, chunks_apart(cache.tables, start, lengths, chunk=chunk, page_size=4, most=1))
    assert tables.shape == (6, chunk // 4)
    want = decode.paged_decode(q, cache.pages(), cache.tables, lengths, scale=1.0, chunk=chunk)
    np.testing.assert_array_equal(decode.paged_decode(q, cache.pages(), tables, inside, scale=1.0), want)
