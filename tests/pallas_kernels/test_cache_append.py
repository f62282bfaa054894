"""cache_append: queries and keys turned, keys and values copied to their places, all else untouched."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_append import cache_append, reference
from tests.pallas_kernels.paged_cases import normal

IMPLEMENTATIONS = ["reference", "xla"]
jitted = jax.jit(functools.partial(cache_append, implementation="xla"))


def append(implementation, args):
    if implementation == "reference":
        return reference.cache_append(*args)
    return tuple(np.array(out) for out in jitted(*args))


def make(head_dim, kv_heads, q_per_kv, page_size, tokens=9, pages=7, seed=0, dtype=np.float32):
    """Random tokens at random places, each its own; two of them past the last page. Pages start as NaN."""
    rng = np.random.default_rng(seed)
    q = normal(rng, tokens, kv_heads, q_per_kv, head_dim).astype(dtype)
    k, v = (normal(rng, tokens, kv_heads, head_dim).astype(dtype) for _ in range(2))
    angles = rng.uniform(-4, 4, (tokens, head_dim // 2))
    k_pages, v_pages = (np.full((pages, kv_heads, page_size, head_dim), np.nan, dtype) for _ in range(2))
    places = rng.permutation(pages * page_size)[:tokens].astype(np.int32)
    page_ids, offsets = places // page_size, places % page_size
    page_ids[3], page_ids[-1] = pages, pages + 1000
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return [q, k, v, cos, sin, k_pages, v_pages, page_ids, offsets]


def places(args):
    """[(token, page, offset)] of the tokens that are kept."""
    return [(t, p, o) for t, (p, o) in enumerate(zip(args[-2], args[-1], strict=True)) if p < len(args[5])]


LAYOUTS = [(64, 1, 1, 4), (80, 2, 3, 16), (96, 3, 4, 64), (128, 1, 7, 4), (256, 2, 4, 16)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_reference(layout):
    args = make(*layout)
    q, k_pages, v_pages = append("xla", args)
    want_q, want_k, want_v = append("reference", args)
    np.testing.assert_allclose(q, want_q, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(k_pages, want_k, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(v_pages, want_v)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_are_copied_bit_for_bit_and_nothing_else_is_written(implementation):
    args = make(64, 2, 3, 4)
    _, k_pages, v_pages = append(implementation, args)
    assert len(places(args)) == 7
    for token, page, offset in places(args):
        np.testing.assert_array_equal(v_pages[page, :, offset], args[2][token])
        assert np.isfinite(k_pages[page, :, offset]).all()
        k_pages[page, :, offset] = v_pages[page, :, offset] = np.nan
    assert np.isnan(k_pages).all()
    assert np.isnan(v_pages).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_quarter_turn_swaps_the_halves(implementation):
    """cos 0, sin 1 take (low, high) to (−high, low): the pairs are halves, not neighbours."""
    args = make(64, 2, 3, 4)
    args[3], args[4] = np.zeros_like(args[3]), np.ones_like(args[4])
    q, k_pages, _ = append(implementation, args)
    np.testing.assert_array_equal(q, np.concatenate([-args[0][..., 32:], args[0][..., :32]], -1))
    for token, page, offset in places(args):
        k = args[1][token]
        np.testing.assert_array_equal(k_pages[page, :, offset], np.concatenate([-k[:, 32:], k[:, :32]], -1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_depend_on_distance_alone(implementation):
    """What RoPE is for: q at m against k at n gives the same score as at m + 40 and n + 40."""
    frequencies = 100.0 ** (-np.arange(32) / 32)
    args = make(64, 1, 1, 4, tokens=4)
    args[0][:], args[1][:] = args[0][0], args[1][0]
    angles = np.asarray([7, 3, 47, 43])[:, None] * frequencies
    args[3], args[4] = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    args[-2], args[-1] = np.asarray([0, 1, 2, 3], np.int32), np.zeros(4, np.int32)
    q, k_pages, _ = append(implementation, args)
    near, far = (float(q[a, 0, 0] @ k_pages[b, 0, 0]) for a, b in ((0, 1), (2, 3)))
    assert near == pytest.approx(far, abs=1e-4)
    assert abs(near - float(args[0][0, 0, 0] @ args[1][0, 0])) > 0.1


def test_bfloat16_turns_in_float32_and_rounds_once():
    args = make(128, 2, 3, 16, dtype=jnp.bfloat16)
    wide = [np.asarray(x, np.float32) if i in (0, 1, 2, 5, 6) else x for i, x in enumerate(args)]
    want_q, want_k, want_v = append("reference", wide)
    q, k_pages, v_pages = append("xla", args)
    assert q.dtype == k_pages.dtype == v_pages.dtype == jnp.bfloat16
    # Half a unit of the last of 8 bits, and float32's own rounding where the turn cancels.
    np.testing.assert_allclose(q.astype(np.float32), want_q, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(k_pages.astype(np.float32), want_k, rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(v_pages.astype(np.float32), want_v)


def test_donated_pages_are_written_in_place():
    args = make(64, 2, 3, 16, pages=500)
    program = jax.jit(cache_append, donate_argnums=(5, 6)).lower(*args).compile()
    assert program.memory_analysis().alias_size_in_bytes == 2 * args[5].nbytes
    assert program.memory_analysis().temp_size_in_bytes < args[5].nbytes // 10


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (9, 2, 3, 63), "head_dim is 63; RoPE turns pairs of dimensions, so it must be even"),
        (1, (9, 1, 64), r"k has shape \(9, 1, 64\); it must be \[9, 2, 64\]"),
        (2, (8, 2, 64), r"v has shape \(8, 2, 64\); it must be \[9, 2, 64\]"),
        (3, (9, 64), r"cos has shape \(9, 64\); it must be \[9, 32\]"),
        (4, (9, 2, 32), r"sin has shape \(9, 2, 32\); it must be \[9, 32\]"),
        (5, (7, 4, 2, 64), r"k_pages has shape \(7, 4, 2, 64\); it must be \[any, 2, any, 64\]"),
        (6, (8, 2, 4, 64), r"v_pages has shape \(8, 2, 4, 64\); it must be \[7, 2, 4, 64\]"),
        (7, (8,), r"page_ids has shape \(8,\); it must be \[9\]"),
        (8, (), r"offsets has shape \(\); it must be \[9\]"),
    ],
)
def test_errors(index, shape, message):
    args = make(64, 2, 3, 4)
    args[index] = np.zeros(shape, args[index].dtype)
    with pytest.raises(ValueError, match=message):
        cache_append(*args)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="cache_append has no implementation 'cuda'; it has: xla"):
        cache_append(*make(64, 2, 3, 4), implementation="cuda")
