"""How many pages a cache gets, and its arrays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, RopeConfig
from jaxinfer.engine.cache import abstract_cache, allocate, pages_per_sequence, plan_pages, stored_dtype
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
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
ONE_SEQUENCE = (25 * 2 + 6 * 3) * PAGE_BYTES


def test_a_windowed_group_needs_its_window_and_one_step():
    assert pages_per_sequence(MODEL, ENGINE) == (25, 6)
    short = dataclasses.replace(ENGINE, max_model_len=17)
    assert pages_per_sequence(MODEL, short) == (5, 5)


def test_pages_for_all_sequences_where_memory_is_plenty():
    assert plan_pages(MODEL, ENGINE, F32, free_bytes=10**9, shards=1) == (75, 18)


def test_groups_shrink_together():
    assert plan_pages(MODEL, ENGINE, F32, free_bytes=2 * ONE_SEQUENCE, shards=1) == (50, 12)
    assert plan_pages(MODEL, ENGINE, F32, free_bytes=ONE_SEQUENCE * 3 // 2, shards=1) == (37, 9)
    assert plan_pages(MODEL, ENGINE, F32, free_bytes=ONE_SEQUENCE, shards=1) == (25, 6)


def test_shards_and_narrow_types_make_room():
    assert plan_pages(MODEL, ENGINE, BF16, free_bytes=ONE_SEQUENCE, shards=1) == (50, 12)
    assert plan_pages(MODEL, ENGINE, F32, free_bytes=ONE_SEQUENCE, shards=2) == (50, 12)


def test_a_given_number_of_pages_is_taken_for_every_group():
    engine = dataclasses.replace(ENGINE, cache=CacheConfig(page_size=4, num_pages=7))
    assert plan_pages(MODEL, engine, F32, free_bytes=0, shards=1) == (7, 7)


@pytest.mark.parametrize(("free", "left"), [(2**20 * 5 + 1, 5), (-(2**20), 0)])
def test_no_room_for_one_sequence(free, left):
    engine = dataclasses.replace(ENGINE, max_model_len=100_000)
    message = (
        f"the cache of one sequence of max_model_len 100000 takes 18 MiB a device, and {left} MiB are left; "
        "lower max_model_len, or raise memory_fraction on a GPU"
    )
    with pytest.raises(ValueError, match=message):
        plan_pages(MODEL, engine, F32, free_bytes=free, shards=1)


def test_every_layer_has_the_pages_of_its_group_split_by_kv_head():
    mesh = build_mesh(tensor=2)
    abstract = abstract_cache(MODEL, (7, 3), 4, jnp.dtype(jnp.bfloat16), mesh)
    cache = allocate(abstract)
    assert [layer.num_pages for layer in cache] == [7, 3, 3, 7, 3]
    for layer in cache:
        assert not layer.quantized
        for leaf in (layer.k, layer.v):
            assert leaf.shape[1:] == (2, 4, 6)
            assert leaf.dtype == jnp.bfloat16
            assert {shard.data.shape[1:] for shard in leaf.addressable_shards} == {(1, 4, 6)}
            assert not np.asarray(leaf, np.float32).any()


def test_latent_attention_keeps_one_vector_a_token():
    """The keys of multi-head latent attention are its values: the cache holds them once, and is planned so."""
    latent = dataclasses.replace(MODEL, num_kv_heads=1, head_dim=40, kv_lora_rank=32, qk_rope_dim=8)
    cache = allocate(abstract_cache(latent, (7, 3), 4, jnp.dtype(jnp.bfloat16), build_mesh()))
    assert [leaf.shape for leaf in jax.tree.leaves(cache[0])] == [(7, 1, 4, 40)]
    free = 10_000_000
    engine = dataclasses.replace(ENGINE, max_num_seqs=10_000, max_num_batched_tokens=10_000)
    pages = plan_pages(latent, engine, BF16, free_bytes=free, shards=1)
    held = [count * len(group.layers) for count, group in zip(pages, latent.cache_groups, strict=True)]
    assert 0.8 * free < sum(held) * 4 * 40 * 2 <= free


def test_recurrent_layers_keep_a_state_per_slot_and_no_pages():
    mixed = dataclasses.replace(
        MODEL,
        windows=(),
        recurrent_layers=(0, 1, 3),
        recurrent_key_heads=2,
        recurrent_value_heads=4,
        recurrent_key_dim=3,
        recurrent_value_dim=5,
        conv_width=4,
    )
    abstract = abstract_cache(mixed, (7,), 4, stored_dtype("int8", BF16), build_mesh(tensor=2), ENGINE.max_num_seqs)
    kept = allocate(abstract)
    assert [len(jax.tree.leaves(layer)) for layer in kept] == [2, 2, 4, 2, 4]
    memory, inputs = jax.tree.leaves(kept[0])
    assert (memory.shape, inputs.shape) == ((3, 2, 2, 3, 5), (3, 2, 3, 3 + 3 + 2 * 5))
    assert {shard.data.shape[:2] for leaf in (memory, inputs) for shard in leaf.addressable_shards} == {(3, 1)}
    assert 3 * mixed.state_bytes == sum(kept[layer].memory.nbytes + kept[layer].inputs.nbytes for layer in (0, 1, 3))
    one = 25 * 2 * PAGE_BYTES // 2  # of the two others, on one of two devices
    states = 3 * mixed.state_bytes // 2
    assert plan_pages(mixed, ENGINE, F32, free_bytes=states + 2 * one, shards=2) == (50,)
    with pytest.raises(ValueError, match="are left beside 0 MiB of states for max_num_seqs 3; lower max_model_len or "):
        plan_pages(mixed, ENGINE, F32, free_bytes=states + one - 1, shards=2)
    with pytest.raises(ValueError, match="a state per sequence: say for how many, max_num_seqs"):
        abstract_cache(mixed, (7,), 4, F32, build_mesh())


@pytest.mark.parametrize(("name", "dtype"), [("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn)])
def test_eight_bits_take_a_scale_per_token_and_head(name, dtype):
    stored = stored_dtype(name, BF16)
    assert stored == dtype
    cache = allocate(abstract_cache(MODEL, (7, 3), 4, stored, build_mesh(tensor=2)))
    shapes = [(7, 2, 4, 6), (7, 2, 6, 4), (7, 2, 4), (7, 2, 4)]  # values have their tokens innermost
    assert [leaf.shape for leaf in jax.tree.leaves(cache[0])] == shapes
    assert [leaf.dtype for leaf in jax.tree.leaves(cache[0])] == [dtype, dtype, F32, F32]
    assert {shard.data.shape for shard in cache[0].k_scales.addressable_shards} == {(7, 1, 4)}
    # 6 bytes and a scale of 4 for a vector of 6.
    one = (25 * 2 + 6 * 3) * 2 * 2 * 4 * (6 + 4)
    engine = dataclasses.replace(ENGINE, max_num_seqs=8)
    assert plan_pages(MODEL, engine, stored, free_bytes=7 * one, shards=1) == (175, 42)


def test_the_models_dtype_unless_told():
    assert stored_dtype("auto", BF16) == BF16
    with pytest.raises(ValueError, match="the cache's dtype is 'int4'; it must be auto, int8 or fp8"):
        CacheConfig(dtype="int4")
