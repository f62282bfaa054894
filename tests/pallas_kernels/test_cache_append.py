"""cache_append: queries and keys turned, keys and values stored in their places, all else untouched."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels.cache_append import cache_append, config, reference
from pallas_kernels.kv_pages import KVPages, abstract_pages
from pallas_kernels.target import CPU, GPUS, H200
from tests.pallas_kernels.interpreter import interpreter
from tests.pallas_kernels.paged_cases import fill, normal

IMPLEMENTATIONS = ["reference", "xla", "mosaic"]


@dataclass(frozen=True)
class Case:
    """The arguments of one call, in numpy."""

    qkv: NDArray[Any]
    cos: NDArray[np.float32] | None
    sin: NDArray[np.float32] | None
    pages: KVPages
    page_ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    options: dict[str, Any]

    @property
    def arrays(self):
        return self.qkv, self.cos, self.sin, self.pages, self.page_ids, self.offsets

    @property
    def places(self):
        """[(token, page, offset)] of the tokens that are kept."""
        places = enumerate(zip(self.page_ids, self.offsets, strict=True))
        return [(t, p, o) for t, (p, o) in places if p < self.pages.num_pages]


def make(
    head_dim=64,
    kv_heads=2,
    q_per_kv=3,
    page_size=4,
    *,
    tokens=9,
    num_pages=7,
    pairs=None,
    norm=False,
    interleaved=False,
    dtype=np.float32,
    cache=None,
    v_transposed=None,
    seed=0,
):
    """Random tokens at random places, each its own; two of them past the last page. Pages start as NaN."""
    rng = np.random.default_rng(seed)
    qkv = normal(rng, tokens, kv_heads, q_per_kv + 2, head_dim).astype(dtype)
    angles = rng.uniform(-4, 4, (tokens, head_dim // 2 if pairs is None else pairs))
    cos, sin = (f(angles).astype(np.float32) if angles.size else None for f in (np.cos, np.sin))
    pages = fill(abstract_pages(num_pages, kv_heads, page_size, head_dim, cache or dtype), np.nan)
    if v_transposed is not None and v_transposed != pages.v_transposed:
        pages = replace(pages, v=pages.v.swapaxes(2, 3), v_transposed=v_transposed)
    places = rng.permutation(num_pages * page_size)[:tokens].astype(np.int32)
    page_ids, offsets = places // page_size, places % page_size
    if tokens > 3:
        page_ids[3], page_ids[-1] = num_pages, num_pages + 1000
    options: dict[str, Any] = {"interleaved": interleaved}
    if norm:
        scales = (1 + 0.3 * normal(rng, 2, head_dim)).astype(dtype)
        options |= {"q_norm": scales[0], "k_norm": scales[1], "norm_eps": 0.03}
    return Case(qkv, cos, sin, jax.tree.map(np.asarray, pages), page_ids, offsets, options)


def append(implementation, case):
    """q, k, v, k_scales, v_scales in numpy, values as [..., page_size, head_dim] however they are stored."""
    pages = case.pages
    if implementation == "reference":
        leaves = [pages.k, pages.v, pages.k_scales, pages.v_scales]
        if not pages.quantized:  # not rounded
            leaves = [leaf if leaf is None else leaf.astype(np.float32) for leaf in leaves]
        options = {k: np.asarray(v, np.float32) if "_norm" in k else v for k, v in case.options.items()}
        q, k, v, k_scales, v_scales = reference.cache_append(
            case.qkv,
            case.cos,
            case.sin,
            *leaves,
            case.page_ids,
            case.offsets,
            v_transposed=pages.v_transposed,
            **options,
        )
    else:
        with execution(implementation if len(case.qkv) else "xla") as how:
            run = jax.jit(lambda *arrays, **norms: cache_append(*arrays, **norms, **how))
            arrays = {name: option for name, option in case.options.items() if name in ("q_norm", "k_norm")}
            how |= {name: option for name, option in case.options.items() if name not in arrays}
            q, new = jax.block_until_ready(run(*case.arrays, **arrays))
        assert new.v_transposed == pages.v_transposed
        assert q.dtype == case.qkv.dtype
        q, k, v, k_scales, v_scales = (
            None if x is None else np.array(x) for x in (q, new.k, new.v, new.k_scales, new.v_scales)
        )
    return q, k, v.swapaxes(2, 3) if pages.v_transposed else v, k_scales, v_scales


@contextlib.contextmanager
def execution(implementation):
    """Options that run this implementation on any machine."""
    if implementation == "xla":
        yield {"implementation": "xla", "target": CPU}
        return
    with interpreter() as interpret:
        yield {"implementation": "mosaic", "target": H200, "interpret": interpret}


def close(case, got, want):
    """Rounded once to the dtype it is stored in: half a unit of its last place, and float32's own error."""
    (q, k, v, *scales), (want_q, want_k, want_v, *want_scales) = got, want
    unit = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8}
    wide = [np.asarray(x, np.float32) for x in (q, k, v, want_q, want_k, want_v)]
    q, k, v, want_q, want_k, want_v = wide
    np.testing.assert_allclose(q, want_q, rtol=1.01 * unit[case.qkv.dtype.name], atol=2e-6)
    for x, want_x, scale, want_scale in zip((k, v), (want_k, want_v), scales, want_scales, strict=True):
        if scale is None:
            rtol = 1.01 * unit[case.pages.dtype.name]
            np.testing.assert_allclose(x, want_x, rtol=rtol, atol=2e-6)
            continue
        np.testing.assert_allclose(scale, want_scale, rtol=2e-6)
        # What lies between two stored values may go either way: one step of int8, a mantissa bit of fp8.
        steps = {"int8": {"rtol": 0, "atol": 1}, "float8_e4m3fn": {"rtol": 2**-3, "atol": 2**-9}}
        np.testing.assert_allclose(x, want_x, **steps[case.pages.dtype.name])
        assert (x != want_x)[~np.isnan(want_x)].mean() < 0.01


CASES = {
    "plain": {},
    "one_head": {"kv_heads": 1, "q_per_kv": 1, "tokens": 1},
    "dim_80": {"head_dim": 80, "q_per_kv": 4, "page_size": 16},
    "dim_96": {"head_dim": 96, "kv_heads": 3, "q_per_kv": 7},
    "dim_128": {"head_dim": 128, "tokens": 21, "q_per_kv": 4},
    "dim_192": {"head_dim": 192, "q_per_kv": 1},
    "dim_256": {"head_dim": 256, "kv_heads": 1, "q_per_kv": 16},
    "norm": {"norm": True},
    "norm_80": {"norm": True, "head_dim": 80},
    "partial": {"pairs": 8, "norm": True},
    "no_rope": {"pairs": 0},
    "no_rope_norm": {"pairs": 0, "norm": True},
    "bfloat16": {"dtype": jnp.bfloat16, "norm": True},
    "float16": {"dtype": np.float16, "head_dim": 96},
    "mixed": {"dtype": np.float16, "cache": jnp.bfloat16},
    "int8": {"cache": np.int8, "page_size": 16},
    "int8_bfloat16": {"cache": np.int8, "dtype": jnp.bfloat16, "norm": True, "head_dim": 80},
    "fp8": {"cache": ml_dtypes.float8_e4m3fn, "tokens": 15},
    "fp8_bfloat16": {"cache": ml_dtypes.float8_e4m3fn, "dtype": jnp.bfloat16, "head_dim": 256, "page_size": 16},
    "int8_rows": {"cache": np.int8, "v_transposed": False, "dtype": jnp.bfloat16},
    "columns": {"v_transposed": True, "dtype": jnp.bfloat16},
}


XLA_CASES = {
    "interleaved": {"interleaved": True},
    "partial_interleaved": {"pairs": 12, "interleaved": True, "norm": True},
}


@pytest.mark.parametrize("name", CASES | XLA_CASES)
def test_xla_equals_the_reference(name):
    case = make(**(CASES | XLA_CASES)[name])
    close(case, append("xla", case), append("reference", case))


@pytest.mark.parametrize("name", CASES)
def test_mosaic_equals_the_reference(name):
    case = make(**{"tokens": 5, **CASES[name]})
    close(case, append("mosaic", case), append("reference", case))


@pytest.mark.parametrize("cache", [np.int8, ml_dtypes.float8_e4m3fn, jnp.bfloat16])
def test_values_of_long_prompts(cache, monkeypatch):
    """Groups of 8 tokens: in a row, with one dropped, across two pages, and what is left over."""
    monkeypatch.setattr(config, "MANY_TOKENS", 1)
    case = make(64, 1, 1, 32, tokens=35, num_pages=3, cache=cache, v_transposed=True, dtype=jnp.bfloat16)
    positions = np.arange(3, 38, dtype=np.int32)
    page_ids, offsets = np.asarray([2, 0], np.int32)[positions // 32], positions % 32
    page_ids[20] = 3
    case = replace(case, page_ids=page_ids, offsets=offsets)
    close(case, append("mosaic", case), append("reference", case))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cache", [None, np.int8, ml_dtypes.float8_e4m3fn])
def test_nothing_else_is_written(implementation, cache):
    case = make(cache=cache)
    _, k, v, k_scales, v_scales = append(implementation, case)
    assert len(case.places) == 7
    for token, page, offset in case.places:
        if cache is None:
            np.testing.assert_array_equal(v[page, :, offset], case.qkv[token, :, -1])
        for leaf, empty in ((k, None), (v, None), (k_scales, 0), (v_scales, 0)):
            if leaf is not None:
                assert np.isfinite(np.asarray(leaf[page, :, offset], np.float32)).all()
                assert np.asarray(leaf[page, :, offset], np.float32).any(axis=-1).all()
                leaf[page, :, offset] = 0 if cache == np.int8 and empty is None else np.nan
    for leaf in (k, v, k_scales, v_scales):
        if leaf is not None:
            wide = np.asarray(leaf, np.float32)
            assert (wide == 0).all() if leaf.dtype == np.int8 else np.isnan(wide).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_quarter_turn_swaps_the_halves(implementation):
    """cos 0, sin 1 take (low, high) to (−high, low): the pairs are halves, not neighbours."""
    case = make()
    case = replace(case, cos=np.zeros_like(case.cos), sin=np.ones_like(case.sin))
    q, k, *_ = append(implementation, case)
    np.testing.assert_array_equal(q, np.concatenate([-case.qkv[:, :, :-2, 32:], case.qkv[:, :, :-2, :32]], -1))
    for token, page, offset in case.places:
        key = case.qkv[token, :, -2]
        np.testing.assert_array_equal(k[page, :, offset], np.concatenate([-key[:, 32:], key[:, :32]], -1))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_quarter_turn_swaps_neighbours_if_interleaved(implementation):
    case = make(pairs=6, interleaved=True)
    case = replace(case, cos=np.zeros_like(case.cos), sin=np.ones_like(case.sin))
    q = append(implementation, case)[0]
    before = case.qkv[:, :, :-2]
    np.testing.assert_array_equal(q[..., 0:12:2], -before[..., 1:12:2])
    np.testing.assert_array_equal(q[..., 1:12:2], before[..., 0:12:2])
    np.testing.assert_array_equal(q[..., 12:], before[..., 12:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_depend_on_distance_alone(implementation):
    """What RoPE is for: q at m against k at n gives the same score as at m + 40 and n + 40."""
    case = make(64, 1, 1, 4, tokens=4)
    qkv = np.broadcast_to(case.qkv[:1], case.qkv.shape)
    angles = np.asarray([7, 3, 47, 43])[:, None] * 100.0 ** (-np.arange(32) / 32)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    page_ids, offsets = np.asarray([0, 1, 2, 3], np.int32), np.zeros(4, np.int32)
    case = replace(case, qkv=qkv, cos=cos, sin=sin, page_ids=page_ids, offsets=offsets)
    q, k, *_ = append(implementation, case)
    near, far = (float(q[a, 0, 0] @ k[b, 0, 0]) for a, b in ((0, 1), (2, 3)))
    assert near == pytest.approx(far, abs=1e-4)
    assert abs(near - float(qkv[0, 0, 0] @ qkv[0, 0, 1])) > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cache", [np.int8, ml_dtypes.float8_e4m3fn])
def test_a_vector_of_zeros_has_scale_zero_and_reads_back_as_zero(implementation, cache):
    case = make(cache=cache)
    case.qkv[1, 0] = 0
    _, k, v, k_scales, v_scales = append(implementation, case)
    page, offset = case.page_ids[1], case.offsets[1]
    assert k_scales[page, 0, offset] == v_scales[page, 0, offset] == 0
    assert not k[page, 0, offset].astype(np.float32).any()
    assert not v[page, 0, offset].astype(np.float32).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens(implementation):
    q, k, v, *_ = append(implementation, make(tokens=0))
    assert q.shape == (0, 2, 3, 64)
    assert np.isnan(k).all()
    assert np.isnan(v).all()


@pytest.mark.parametrize("cache", [np.float32, jnp.bfloat16, np.float16, np.int8, ml_dtypes.float8_e4m3fn])
def test_donated_pages_are_written_in_place(cache):
    case = make(cache=cache, num_pages=500, page_size=16)
    program = jax.jit(cache_append, donate_argnums=3).lower(*case.arrays).compile()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(case.pages))
    assert program.memory_analysis().alias_size_in_bytes == held
    assert program.memory_analysis().temp_size_in_bytes < held // 10


SHAPE_ERRORS = [
    ("qkv", (9, 1, 5, 64), r"qkv has shape \(9, 1, 5, 64\); it must be \[any, 2, any, 64\]"),
    ("qkv", (9, 2, 2, 64), "qkv holds 2 heads for each kv head; it needs a query, a key and a value: at least 3"),
    ("cos", (8, 32), r"cos has shape \(8, 32\); it must be \[9, any\]"),
    ("cos", (9, 33), r"sin has shape \(9, 32\); it must be \[9, 33\]"),
    ("sin", (9, 2, 32), r"sin has shape \(9, 2, 32\); it must be \[9, 32\]"),
    ("page_ids", (8,), r"page_ids has shape \(8,\); it must be \[9\]"),
    ("offsets", (), r"offsets has shape \(\); it must be \[9\]"),
    ("q_norm", (32,), r"q_norm has shape \(32,\); it must be \[64\]"),
    ("k_norm", (2, 64), r"k_norm has shape \(2, 64\); it must be \[64\]"),
]


@pytest.mark.parametrize(("name", "shape", "message"), SHAPE_ERRORS)
def test_shapes_that_disagree_are_refused(name, shape, message):
    case, wrong = make(), np.zeros(shape, np.float32)
    norms = {name: wrong} if "norm" in name else {}
    arrays = case.arrays if norms else replace(case, **{name: wrong}).arrays
    with pytest.raises(ValueError, match=message):
        cache_append(*arrays, **norms)


def test_pages_that_disagree_are_refused():
    case = make(cache=np.int8)
    wrong = replace(case.pages, v=case.pages.v.swapaxes(2, 3))
    with pytest.raises(ValueError, match=r"v has shape \(7, 2, 4, 64\); it must be \[7, 2, 64, 4\]"):
        cache_append(*replace(case, pages=wrong).arrays)


def test_more_pairs_than_dimensions_are_refused():
    angles = np.zeros((9, 33), np.float32)
    with pytest.raises(ValueError, match="cos turns 33 pairs of dimensions; head_dim 64 has 32"):
        cache_append(*replace(make(), cos=angles, sin=angles).arrays)


def test_half_a_rotation_is_refused():
    with pytest.raises(ValueError, match="cos and sin come together; only one of them is None"):
        cache_append(*replace(make(), sin=None).arrays)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="cache_append has no implementation 'cuda'; it has: mosaic, xla"):
        cache_append(*make().arrays, implementation="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": CPU}, "needs an NVIDIA GPU of compute capability 9.0 or more, and this is a CPU"),
        ({"target": GPUS["a100"]}, "needs an NVIDIA GPU of compute capability 9.0 or more, and this is compute cap"),
        ({"target": GPUS["b200"], "interleaved": True}, "turns halves of a head, not neighbouring dimensions"),
    ],
)
def test_the_kernel_is_refused_where_it_cannot_run(options, message):
    with pytest.raises(ValueError, match=message):
        cache_append(*make().arrays, **options, implementation="mosaic")
