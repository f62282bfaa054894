"""Pages whose keys are the values, too: the same results as of two equal pools, from one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_append import cache_append
from pallas_kernels.kv_pages import KVPages, abstract_pages
from pallas_kernels.paged_decode import paged_decode, reference
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.target import H200
from tests.pallas_kernels.paged_cases import Layout, make_cache, normal, tolerance

DTYPES = ["float32", "int8", "float8_e4m3fn"]
LAYOUT = Layout(head_dim=24, kv_heads=1, q_per_kv=3, page_size=4, width=5)
LENGTHS = [20, 1, 0, 13]


def one_pool(pages: KVPages) -> KVPages:
    return replace(pages, v=None, v_scales=None, v_transposed=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_takes_the_keys_for_values(dtype):
    cache = make_cache(LAYOUT, LENGTHS, seed=0)
    pages, q = one_pool(cache.pages(dtype)), normal(np.random.default_rng(1), 4, 1, 3, 24)
    want = reference.paged_decode(q, pages, cache.tables, np.asarray(LENGTHS), scale=LAYOUT.scale)
    q, pages, tables, lengths = jax.tree.map(jnp.asarray, (q, pages, cache.tables, LENGTHS))
    lengths = jnp.stack(lengths)
    out = paged_decode(q, pages, tables, lengths, scale=LAYOUT.scale)
    np.testing.assert_allclose(out, want, **tolerance("float32", 24))
    assert np.abs(want[[0, 1, 3]]).min() > 0

    starts = jnp.asarray([0, 1, 2, 2, 3])  # the newest token of each: a prefill of one token is a decode
    chunk = paged_prefill(q[jnp.asarray([0, 1, 3])], pages, tables, starts, lengths, scale=LAYOUT.scale)
    np.testing.assert_allclose(chunk, want[[0, 1, 3]], **tolerance("float32", 24))


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_writes_the_keys_alone(dtype):
    rng = np.random.default_rng(2)
    qkv = jnp.asarray(normal(rng, 5, 1, 5, 24))
    cos, sin = (jnp.asarray(normal(rng, 5, 4)) for _ in range(2))
    ids, offsets = jnp.asarray([6, 0, 7, 6, 2]), jnp.asarray([3, 0, 1, 0, 2])  # 7: dropped
    pools = [
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_pages(7, 1, 4, 24, dtype, shared=shared))
        for shared in (False, True)
    ]
    both = cache_append(qkv, cos, sin, pools[0], ids, offsets)
    alone = cache_append(qkv[:, :, :-1], cos, sin, pools[1], ids, offsets)
    np.testing.assert_array_equal(alone[0], both[0])
    assert alone[1].v is None
    assert np.any(np.asarray(alone[1].k, np.float32))
    jax.tree.map(np.testing.assert_array_equal, alone[1], one_pool(both[1]))


def test_what_does_not_belong_together_is_refused():
    pages = abstract_pages(7, 1, 4, 24, "int8", shared=True)
    pages.check()
    assert len(jax.tree.leaves(pages)) == 2
    with pytest.raises(ValueError, match="has scales of values, and no values; pages whose keys are the values have"):
        replace(pages, v_scales=pages.k_scales).check()
    zeros = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"holds 1 heads for each kv head; it needs a query and a key: at least 2"):
        cache_append(jnp.zeros((3, 1, 1, 24)), None, None, pages, zeros, zeros)


def test_no_kernel_takes_them():
    pages, bf16 = abstract_pages(7, 1, 64, 128, jnp.bfloat16, shared=True), jnp.bfloat16
    q, ids = jnp.zeros((3, 1, 2, 128), bf16), jnp.zeros(3, jnp.int32)
    options = {"scale": 1.0, "target": H200, "implementation": "mosaic"}
    with pytest.raises(ValueError, match="keys are the values, too"):
        paged_decode(q, pages, jnp.zeros((3, 2), jnp.int32), ids, **options)
    with pytest.raises(ValueError, match="keys are the values, too"):
        paged_prefill(q, pages, jnp.zeros((3, 2), jnp.int32), jnp.zeros(4, jnp.int32), ids, **options)
    with pytest.raises(ValueError, match="these pages hold keys alone"):
        cache_append(q, None, None, pages, ids, ids, target=H200, implementation="mosaic")
