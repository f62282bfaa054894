"""Weights as declared; laid out for a mesh they compute the same."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.parameters import (
    count,
    declare,
    fitting_tensor_sizes,
    flatten,
    for_tensor_parallel,
    to_physical,
    unflatten,
)
from meshes import partition_spec

MODEL = ModelConfig(
    family="qwen2",
    vocab_size=51,
    hidden_size=20,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
    mlp_size=48,
    max_position=64,
    rope=RopeConfig(),
)
FULL = dataclasses.replace(MODEL, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)


def random_weights(config, seed=0):
    rng = np.random.default_rng(seed)
    return {path: rng.standard_normal(p.shape).astype(np.float32) for path, p in flatten(declare(config))}


def test_the_declared_shapes_and_axes():
    leaves = {path: (p.shape, p.axes) for path, p in flatten(declare(FULL)) if not path.startswith("layers.1")}
    assert leaves == {
        "embed.weight": ((51, 20), ("vocab", "embed")),
        "layers.0.attention_norm.scale": ((20,), ("embed",)),
        "layers.0.attention.qkv": ((20, 2, 6, 6), ("embed", "kv_heads", None, "head_dim")),
        "layers.0.attention.out": ((2, 4, 6, 20), ("kv_heads", None, "head_dim", "embed")),
        "layers.0.attention.qkv_bias": ((2, 6, 6), ("kv_heads", None, "head_dim")),
        "layers.0.attention.out_bias": ((20,), ("embed",)),
        "layers.0.attention.q_norm.scale": ((6,), ("head_dim",)),
        "layers.0.attention.k_norm.scale": ((6,), ("head_dim",)),
        "layers.0.mlp_norm.scale": ((20,), ("embed",)),
        "layers.0.mlp.gate_up": ((20, 2, 48), ("embed", None, "mlp")),
        "layers.0.mlp.down": ((48, 20), ("mlp", "embed")),
        "layers.0.mlp.gate_up_bias": ((2, 48), (None, "mlp")),
        "layers.0.mlp.down_bias": ((20,), ("embed",)),
        "final_norm.scale": ((20,), ("embed",)),
        "head.weight": ((20, 51), ("embed", "vocab")),
    }


def test_switches_add_and_remove_leaves():
    plain = {path for path, _ in flatten(declare(MODEL))}
    assert not [path for path in plain if "bias" in path or "q_norm" in path]
    tied = {path for path, _ in flatten(declare(dataclasses.replace(MODEL, tied_head=True)))}
    assert plain - tied == {"head.weight"}
    attention, mlp = 20 * 2 * 6 * 6 + 8 * 6 * 20, 3 * 20 * 48
    assert count(MODEL) == 2 * 51 * 20 + 20 + 2 * (attention + mlp + 40)
    assert count(FULL) - count(MODEL) == 2 * (2 * 6 * 6 + 20 + 2 * 48 + 20 + 2 * 6)


def test_a_weight_starts_by_its_inputs():
    starts = {path: (p.initialiser, p.fan_in) for path, p in flatten(declare(FULL))}
    assert starts["layers.1.attention.qkv"] == ("normal", 20)
    assert starts["layers.1.attention.out"] == ("normal", 48)
    assert starts["layers.1.mlp.gate_up"] == ("normal", 20)
    assert starts["layers.1.mlp.down"] == ("normal", 48)
    assert starts["head.weight"] == ("normal", 20)
    assert starts["final_norm.scale"][0] == starts["layers.0.attention.q_norm.scale"][0] == "ones"
    assert {kind for path, (kind, _) in starts.items() if path.endswith("bias")} == {"zeros"}


def test_flatten_and_unflatten_are_inverse():
    tree = declare(dataclasses.replace(FULL, num_layers=12))
    assert unflatten(dict(flatten(tree))) == tree
    assert list(unflatten({"layers.10.x": 1, "layers.2.x": 2})["layers"]) == [10, 2]
    assert dict(flatten({"a": {0: {"b": 3}}, "c": 4})) == {"a.0.b": 3, "c": 4}


def attention(config, weights, x, path="layers.0.attention"):
    """Grouped-query attention head by head: query head h reads kv head h // q_per_kv. x: [tokens, embed]."""
    qkv, out = weights[f"{path}.qkv"].astype(np.float64), weights[f"{path}.out"].astype(np.float64)
    projected = np.einsum("te,ekgd->tkgd", x, qkv) + weights[f"{path}.qkv_bias"]
    result = np.zeros((len(x), config.hidden_size))
    mask = np.tril(np.ones((len(x), len(x)), bool))
    for head in range(config.num_heads):
        kv, query = divmod(head, config.q_per_kv)
        q, k, v = projected[:, kv, query], projected[:, kv, config.q_per_kv], projected[:, kv, config.q_per_kv + 1]
        weight = np.where(mask, np.exp(q @ k.T / np.sqrt(config.head_dim)), 0.0)
        result += (weight / weight.sum(-1, keepdims=True)) @ v @ out[kv, query]
    return result


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_replicated_kv_heads_compute_the_same_attention(tensor):
    physical = for_tensor_parallel(FULL, tensor)
    weights = random_weights(FULL)
    laid_out = {path: to_physical(path, array, FULL, physical) for path, array in weights.items()}
    x = np.random.default_rng(1).standard_normal((5, 20)) * 0.2
    want = attention(FULL, weights, x)
    np.testing.assert_allclose(attention(physical, laid_out, x), want, rtol=1e-9, atol=1e-9)
    # Query heads keep their order: shard s of the output projection is rows of query heads in order.
    np.testing.assert_array_equal(
        laid_out["layers.0.attention.out"].reshape(8, 6, 20), weights["layers.0.attention.out"].reshape(8, 6, 20)
    )


def test_output_gates_go_with_their_query_heads():
    """Where kv heads are replicated, a copy takes a share of the queries, and of the gates behind key and value."""
    gated = dataclasses.replace(MODEL, attention_gate=True)
    physical = for_tensor_parallel(gated, 4)
    qkv = random_weights(gated)["layers.0.attention.qkv"]
    laid_out = to_physical("layers.0.attention.qkv", qkv, gated, physical)
    queries, keys_values, gates = np.split(laid_out, [2, 4], axis=2)
    np.testing.assert_array_equal(queries.reshape(20, 8, 6), qkv[:, :, :4].reshape(20, 8, 6))
    np.testing.assert_array_equal(keys_values, qkv[:, :, 4:6].repeat(2, axis=1))
    np.testing.assert_array_equal(gates.reshape(20, 8, 6), qkv[:, :, 6:].reshape(20, 8, 6))


def test_a_mesh_divides_the_heads_of_recurrent_layers_too():
    heads = {"recurrent_key_heads": 2, "recurrent_value_heads": 4, "recurrent_key_dim": 4, "recurrent_value_dim": 4}
    mixed = dataclasses.replace(MODEL, recurrent_layers=(0,), conv_width=4, **heads)
    assert fitting_tensor_sizes(MODEL) == [1, 2, 4, 8]
    assert fitting_tensor_sizes(mixed) == [1, 2]
    with pytest.raises(ValueError, match=r"2 kv heads, 2 key heads of recurrent layers and an MLP of 48; .*: 1, 2$"):
        for_tensor_parallel(mixed, 4)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_physical_arrays_have_the_declared_shapes_and_divide(tensor):
    physical = for_tensor_parallel(FULL, tensor)
    declared = dict(flatten(declare(physical)))
    for path, array in random_weights(FULL).items():
        laid_out = to_physical(path, array, FULL, physical)
        assert laid_out.shape == declared[path].shape, path
        for size, axis in zip(laid_out.shape, partition_spec(declared[path].axes), strict=True):
            assert axis is None or size % tensor == 0, path


def test_the_vocabulary_is_padded_with_zeros():
    physical = for_tensor_parallel(MODEL, 4)
    assert (physical.vocab_size, physical.vocab_padding, physical.vocab_rows) == (51, 1, 52)
    weights = random_weights(MODEL)
    embed, head = (to_physical(path, weights[path], MODEL, physical) for path in ("embed.weight", "head.weight"))
    np.testing.assert_array_equal(embed[:51], weights["embed.weight"])
    np.testing.assert_array_equal(head[:, :51], weights["head.weight"])
    assert embed.shape == (52, 20)
    assert head.shape == (20, 52)
    assert not embed[51:].any()
    assert not head[:, 51:].any()


def test_layout_traces_under_jit():
    physical = for_tensor_parallel(FULL, 8)
    weights = random_weights(FULL)

    def lay_out(arrays):
        return {path: to_physical(path, array, FULL, physical) for path, array in arrays.items()}

    want = lay_out(weights)
    for path, array in jax.jit(lay_out)(jax.tree.map(jnp.asarray, weights)).items():
        np.testing.assert_array_equal(array, want[path])


def test_fitting_sizes_are_those_that_give_every_shard_whole_heads():
    """By what it means: a shard has whole kv heads and their queries, or a share of the queries of just one."""
    for heads, kv, mlp in itertools.product((1, 3, 6, 8, 9, 12, 32), (1, 2, 3, 4, 8), (48, 96, 100)):
        if heads % kv:
            continue
        config = dataclasses.replace(MODEL, num_heads=heads, num_kv_heads=kv, mlp_size=mlp)
        want = []
        for tensor in range(1, 40):
            queries = [list(range(s * heads // tensor, (s + 1) * heads // tensor)) for s in range(tensor)]
            read = [{q // (heads // kv) for q in shard} for shard in queries]
            whole = all(len(shard) * tensor == heads for shard in queries)
            split = [sum(head in shard for shard in read) for head in range(kv)]
            owns = all(len(shard) == 1 for shard in read) if tensor > kv else split == [1] * kv
            if whole and owns and mlp % tensor == 0:
                want.append(tensor)
        assert fitting_tensor_sizes(config) == want, (heads, kv, mlp)


@pytest.mark.parametrize(
    ("change", "tensor", "fitting"),
    [
        ({}, 3, "1, 2, 4, 8"),
        ({}, 16, "1, 2, 4, 8"),
        ({"mlp_size": 36}, 8, "1, 2, 4"),
        ({"num_heads": 9, "num_kv_heads": 3, "mlp_size": 1536}, 2, "1, 3"),
        ({"num_heads": 12, "num_kv_heads": 4, "mlp_size": 96}, 3, "1, 2, 4, 12"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(change, tensor, fitting):
    config = dataclasses.replace(MODEL, **change)
    message = (
        f"tensor_parallel_size {tensor} does not fit {config.num_heads} query heads, {config.num_kv_heads} kv heads "
        f"and an MLP of {config.mlp_size}; sizes that fit: {fitting}$"
    )
    with pytest.raises(ValueError, match=message):
        for_tensor_parallel(config, tensor)


def test_a_config_is_laid_out_once():
    with pytest.raises(ValueError, match="the config is already laid out for a mesh; start from the canonical one"):
        for_tensor_parallel(for_tensor_parallel(MODEL, 4), 4)
