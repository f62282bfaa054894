"""The multi-GPU script, on two virtual devices."""

import json

import jax
import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from meshes import build_mesh
from scripts import bench_multi_gpu
from scripts.step_timing import StepBench

SMALL = ModelConfig(
    "llama", vocab_size=251, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=96,
    max_position=256, rope=RopeConfig(),
)  # fmt: skip


def test_tensor_2_gives_the_tokens_of_tensor_1(capsys):
    config = {**bench_multi_gpu.TINY, "num_hidden_layers": 1, "num_key_value_heads": 1}
    bench_multi_gpu.check_equal("tiny", config, 2, 2)
    assert capsys.readouterr().out == "tiny: tensor 2 equals tensor 1\n"


def test_a_difference_ends_the_script(monkeypatch, capsys):
    """Weights written anew for every load, each time others, cannot give the same tokens twice."""
    seeds = iter(range(10))
    monkeypatch.setattr(np.random, "default_rng", lambda _, make=np.random.default_rng: make(next(seeds)))
    original = bench_multi_gpu.LLM

    def reloaded(folder, **settings):
        bench_multi_gpu.write_random_checkpoint(config, bench_multi_gpu.Path(folder), 1)
        return original(folder, **settings)

    config = {**bench_multi_gpu.TINY, "num_hidden_layers": 1, "num_key_value_heads": 1}
    monkeypatch.setattr(bench_multi_gpu, "LLM", reloaded)
    with pytest.raises(SystemExit):
        bench_multi_gpu.check_equal("tiny", config, 1, 2)
    assert "DIFFERS FROM" in capsys.readouterr().out


def test_checkpoint_files_share_the_tensors(tmp_path):
    bench_multi_gpu.write_random_checkpoint({**bench_multi_gpu.TINY, "num_key_value_heads": 2}, tmp_path, 3)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) == 3
    assert {path.name for path in tmp_path.glob("*.safetensors")} == set(weight_map.values())


def test_all_reduce_chain_adds_over_the_devices():
    """Halving after each sum of two equal parts changes nothing."""
    x = jax.numpy.ones((3, 8), jax.numpy.bfloat16)
    np.testing.assert_array_equal(bench_multi_gpu.all_reduce_chain(x, build_mesh(tensor=2)), np.ones((3, 8)))


def test_half_of_weights_and_cache_on_each_device():
    bench = StepBench(SMALL, build_mesh(tensor=2), max_batch=2, context=70, prefill_tokens=128)
    batch = bench.decode_batch(2)
    bench.runner.compile([batch.shape])
    assert bench.time(batch, 2).step_ms > 0
    cache = bench_multi_gpu.bytes_per_device(bench.runner.state.cache)
    page = 2 * 64 * 1 * 16 * 2  # k and v, one kv head of bfloat16 each
    assert list(cache.values()) == [2 * 4 * page] * 2  # layers, pages
    weights = list(bench_multi_gpu.bytes_per_device(bench.weights).values())
    norms = 5 * 64 * 2
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(bench.weights))
    assert weights == [(whole - norms) // 2 + norms] * 2
