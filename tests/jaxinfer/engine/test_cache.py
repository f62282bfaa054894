"""How many pages a cache gets, and its arrays."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, RopeConfig
from jaxinfer.engine.cache import abstract_cache, allocate, pages_per_sequence, plan_pages
from meshes import build_mesh

MODEL = ModelConfig(
    family="llama",
    vocab_size=11,
    hidden_size=8,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_size=8,
    max_position=1000,
    rope=RopeConfig(),
    windows=(None, 10, 10, None, 10),
)
ENGINE = EngineConfig(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=8, cache=CacheConfig(page_size=4))
# 25 pages of two full layers; 9 + 8 tokens span at most 6 pages of three windowed ones. A page: k and v of 2 x 4 x 6.
PAGE_BYTES = 2 * 2 * 4 * 6 * 4
ONE_SEQUENCE = (25 * 2 + 6 * 3) * PAGE_BYTES


def test_a_windowed_group_needs_its_window_and_one_step():
    assert pages_per_sequence(MODEL, ENGINE) == (25, 6)
    short = dataclasses.replace(ENGINE, max_model_len=17)
    assert pages_per_sequence(MODEL, short) == (5, 5)


def test_pages_for_all_sequences_where_memory_is_plenty():
    assert plan_pages(MODEL, ENGINE, 4, free_bytes=10**9, shards=1) == (75, 18)


def test_groups_shrink_together():
    assert plan_pages(MODEL, ENGINE, 4, free_bytes=2 * ONE_SEQUENCE, shards=1) == (50, 12)
    assert plan_pages(MODEL, ENGINE, 4, free_bytes=ONE_SEQUENCE * 3 // 2, shards=1) == (37, 9)
    assert plan_pages(MODEL, ENGINE, 4, free_bytes=ONE_SEQUENCE, shards=1) == (25, 6)


def test_shards_and_narrow_types_make_room():
    assert plan_pages(MODEL, ENGINE, 2, free_bytes=ONE_SEQUENCE, shards=1) == (50, 12)
    assert plan_pages(MODEL, ENGINE, 4, free_bytes=ONE_SEQUENCE, shards=2) == (50, 12)


def test_a_given_number_of_pages_is_taken_for_every_group():
    engine = dataclasses.replace(ENGINE, cache=CacheConfig(page_size=4, num_pages=7))
    assert plan_pages(MODEL, engine, 4, free_bytes=0, shards=1) == (7, 7)


@pytest.mark.parametrize(("free", "left"), [(2**20 * 5 + 1, 5), (-(2**20), 0)])
def test_no_room_for_one_sequence(free, left):
    engine = dataclasses.replace(ENGINE, max_model_len=100_000)
    message = (
        f"the cache of one sequence of max_model_len 100000 takes 18 MiB a device, and {left} MiB are left; "
        "lower max_model_len, or raise memory_fraction on a GPU"
    )
    with pytest.raises(ValueError, match=message):
        plan_pages(MODEL, engine, 4, free_bytes=free, shards=1)


def test_every_layer_has_the_pages_of_its_group_split_by_kv_head():
    mesh = build_mesh(tensor=2)
    abstract = abstract_cache(MODEL, (7, 3), 4, jnp.dtype(jnp.bfloat16), mesh)
    cache = allocate(abstract)
    assert [layer["k"].shape[0] for layer in cache] == [7, 3, 3, 7, 3]
    for layer in cache:
        assert set(layer) == {"k", "v"}
        for leaf in layer.values():
            assert leaf.shape[1:] == (2, 4, 6)
            assert leaf.dtype == jnp.bfloat16
            assert {shard.data.shape[1:] for shard in leaf.addressable_shards} == {(1, 4, 6)}
            assert not np.asarray(leaf, np.float32).any()
