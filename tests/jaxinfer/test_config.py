"""Configs refuse what cannot be, and survive a trip through JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxinfer.config import CacheConfig, CacheGroup, EngineConfig, ModelConfig, ParallelConfig, QueryScaling, RopeConfig

MODEL = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    num_layers=5,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    max_position=128,
    rope=RopeConfig(theta=500.0, kind="llama3", factor=8.0, original_max_position=64),
    windows=(None, 16, None, 8, 16),
    vocab_padding=3,
    bos_token_id=1,
    eos_token_ids=(2, 5),
)


def test_layers_group_by_window_in_order_of_first_use():
    assert MODEL.cache_groups == (CacheGroup(None, (0, 2)), CacheGroup(16, (1, 4)), CacheGroup(8, (3,)))
    assert [MODEL.window(layer) for layer in range(5)] == [None, 16, None, 8, 16]
    chunked = dataclasses.replace(MODEL, chunks=(8, 8, None, None, 8))
    assert chunked.cache_groups == (
        *(CacheGroup(None, (0,), 8), CacheGroup(16, (1, 4), 8)),
        *(CacheGroup(None, (2,)), CacheGroup(8, (3,))),
    )
    full = dataclasses.replace(MODEL, windows=())
    assert full.cache_groups == (CacheGroup(None, (0, 1, 2, 3, 4)),)
    assert full.window(3) is None


def test_derived_sizes():
    assert MODEL.q_per_kv == 3
    assert MODEL.vocab_rows == 100
    assert MODEL.kv_elements_per_token() == 2 * 5 * 2 * 8
    latent = dataclasses.replace(MODEL, num_kv_heads=1, head_dim=40, kv_lora_rank=32, qk_rope_dim=8)
    assert latent.kv_elements_per_token() == 5 * 40


def test_a_config_survives_json():
    model = dataclasses.replace(MODEL, query_scaling=QueryScaling(0.1, 64), chunks=(8,) * 5)
    again = ModelConfig.from_dict(json.loads(json.dumps(model.to_dict())))
    assert again == model
    assert hash(again) == hash(model)


def test_unknown_fields_are_refused():
    values = MODEL.to_dict() | {"soft_cap": 30.0, "experts": 8}
    with pytest.raises(ValueError, match="unknown fields in the model config: experts, soft_cap; written by a newer"):
        ModelConfig.from_dict(values)
    with pytest.raises(TypeError, match="unexpected keyword argument 'spiral'"):
        ModelConfig.from_dict(MODEL.to_dict() | {"rope": {"spiral": True}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 7}, "num_heads 7 is not a multiple of num_kv_heads 2"),
        ({"chunks": (4,)}, "1 chunks for 5 layers: give one per layer, or none"),
        ({"windows": (None, 4)}, "2 windows for 5 layers: give one per layer, or none"),
        (
            {"bidirectional": True},
            "what sees the tokens that follow cannot predict them: bidirectional goes with headle",
        ),
        ({"bidirectional": True, "headless": True}, "ALiBi look back only: they do not go with bidirectional"),
    ],
)
def test_model_config_errors(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODEL, **change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheConfig(page_size=0), "page_size is 0; it must be a power of two"),
        (lambda: CacheConfig(page_size=48), "page_size is 48; it must be a power of two"),
        (lambda: CacheConfig(num_pages=0), "num_pages is 0; it must be at least 1, or None to fill the memory left"),
        (lambda: CacheConfig(memory_fraction=0.0), "memory_fraction is 0.0; it must be above 0 and at most 1"),
        (lambda: CacheConfig(memory_fraction=1.01), "memory_fraction is 1.01; it must be above 0 and at most 1"),
        (lambda: ParallelConfig(tensor=0), "mesh axis 'tensor' has size 0; it must be at least 1"),
        (lambda: ParallelConfig(pipe=2), "mesh axis 'pipe' has size 2; only 'tensor' may exceed 1 so far"),
        (lambda: EngineConfig(max_model_len=0), "max_model_len is 0; it must be at least 1"),
        (lambda: EngineConfig(max_model_len=8, max_num_seqs=0), "max_num_seqs is 0; it must be at least 1"),
        (lambda: EngineConfig(max_model_len=8, steps_in_flight=0), "steps_in_flight is 0; it must be at least 1"),
        (
            lambda: EngineConfig(max_model_len=8, max_num_seqs=9, max_num_batched_tokens=8),
            "max_num_batched_tokens is 8, below max_num_seqs 9: a step takes at least a token of every sequence",
        ),
    ],
)
def test_runtime_config_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_smallest_and_largest_allowed_values():
    assert CacheConfig(page_size=1, num_pages=1, memory_fraction=1.0).page_size == 1
    assert EngineConfig(max_model_len=1, max_num_seqs=8, max_num_batched_tokens=8, steps_in_flight=1).max_num_seqs == 8
