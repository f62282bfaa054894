"""Hugging Face checkpoints onto a mesh: every weight in its place, and what is refused."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest

import convert
from tests import tiny
from tests.convert.meshed import abstract_tree, assert_same, load_flat


def opened(name, folder, **options):
    return convert.open_checkpoint(tiny.write_checkpoint(name, folder, **options))


def rewrite(name, folder, change, **options):
    """A case with `change` made to its tensors; returns the folder."""
    tiny.write_checkpoint(name, folder)
    tensors = tiny.weights(name)
    change(tensors)
    tiny.write_safetensors(tensors, folder, **options)
    return folder


def expected_weights(name, config):
    """Path → array, spelled out head by head from the Hugging Face tensors."""
    tensors, c = tiny.weights(name), config
    expected = {"embed.weight": tensors["model.embed_tokens.weight"], "final_norm.scale": tensors["model.norm.weight"]}
    if not c.tied_head:
        expected["head.weight"] = tensors["lm_head.weight"].T

    def heads(kind, kv, suffix):
        projection = tensors[f"{attention}.{kind}_proj.{suffix}"]
        count = c.q_per_kv if kind == "q" else 1
        first = kv * count
        return [projection[(first + i) * c.head_dim : (first + i + 1) * c.head_dim].T for i in range(count)]

    for layer in range(c.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        expected[f"{ours}.attention_norm.scale"] = tensors[f"{theirs}.input_layernorm.weight"]
        expected[f"{ours}.mlp_norm.scale"] = tensors[f"{theirs}.post_attention_layernorm.weight"]
        for suffix, path in (("weight", "qkv"), ("bias", "qkv_bias")):
            if f"{attention}.q_proj.{suffix}" in tensors:
                groups = [
                    np.stack([h for kind in "qkv" for h in heads(kind, kv, suffix)], axis=-2)
                    for kv in range(c.num_kv_heads)
                ]
                expected[f"{ours}.attention.{path}"] = np.stack(groups, axis=-3)
        output = tensors[f"{attention}.o_proj.weight"].T
        expected[f"{ours}.attention.out"] = output.reshape(c.num_kv_heads, c.q_per_kv, c.head_dim, c.hidden_size)
        gate_up = [tensors[f"{mlp}.{kind}_proj.weight"].T for kind in ("gate", "up")]
        expected[f"{ours}.mlp.gate_up"] = np.stack(gate_up, axis=1)
        expected[f"{ours}.mlp.down"] = tensors[f"{mlp}.down_proj.weight"].T
        if c.out_bias:
            expected[f"{ours}.attention.out_bias"] = tensors[f"{attention}.o_proj.bias"]
        if c.mlp_bias:
            biases = [tensors[f"{mlp}.{kind}_proj.bias"] for kind in ("gate", "up")]
            expected[f"{ours}.mlp.gate_up_bias"] = np.stack(biases)
            expected[f"{ours}.mlp.down_bias"] = tensors[f"{mlp}.down_proj.bias"]
        if c.qk_norm:
            for norm in ("q_norm", "k_norm"):
                expected[f"{ours}.attention.{norm}.scale"] = tensors[f"{attention}.{norm}.weight"]
    return expected


@pytest.mark.parametrize("name", tiny.CASES)
def test_every_weight_in_its_place(name, tmp_path):
    checkpoint = opened(name, tmp_path)
    loaded, expected = load_flat(checkpoint), expected_weights(name, checkpoint.config)
    assert loaded.keys() == expected.keys()
    for path, array in loaded.items():
        np.testing.assert_array_equal(np.asarray(array), expected[path], err_msg=path)


def test_blocks_of_rows_join_up(tmp_path, monkeypatch):
    """Blocks far smaller than a tensor, cut at heads."""
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 1000)
    checkpoint = opened("llama_biases", tmp_path)
    for path, array in expected_weights("llama_biases", checkpoint.config).items():
        np.testing.assert_array_equal(checkpoint.read(path, np.float32), array, err_msg=path)


def test_sharded_equals_single(tmp_path):
    single, sharded = opened("qwen3", tmp_path / "one"), opened("qwen3", tmp_path / "three", shards=3)
    assert not (tmp_path / "three" / "model.safetensors").exists()
    assert_same(load_flat(single), load_flat(sharded))


@pytest.mark.parametrize("tensor", [2, 8])
def test_tensor_parallel_pads_the_vocabulary_and_copies_kv_heads(tensor, tmp_path):
    checkpoint = opened("llama", tmp_path)
    one, many = load_flat(checkpoint), load_flat(checkpoint, tensor)
    vocab, heads = checkpoint.config.vocab_size, max(2, tensor)
    assert many["embed.weight"].shape[0] == -(-vocab // tensor) * tensor
    np.testing.assert_array_equal(np.asarray(many["embed.weight"])[:vocab], one["embed.weight"])
    assert not np.asarray(many["head.weight"])[:, vocab:].any()
    path = "layers.1.attention.qkv"
    canonical, physical = np.asarray(one[path]), np.asarray(many[path])
    queries = 8 // heads
    for head in range(heads):
        own = head * 2 // heads
        first = head * queries - own * 4
        np.testing.assert_array_equal(physical[:, head, :queries], canonical[:, own, first : first + queries])
        np.testing.assert_array_equal(physical[:, head, queries:], canonical[:, own, 4:])
    assert many[path].sharding.shard_shape(physical.shape)[1] == heads // tensor


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_dtypes_are_kept_and_cast(stored, tmp_path):
    checkpoint = opened("qwen2", tmp_path, dtype=stored)
    assert checkpoint.dtype == stored
    target = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[stored]
    exact = expected_weights("qwen2", checkpoint.config)
    for dtype in (target, np.float32):
        for path, array in load_flat(checkpoint, dtype=dtype).items():
            assert array.dtype == dtype
            np.testing.assert_array_equal(np.asarray(array), exact[path].astype(target).astype(dtype), err_msg=path)


def test_values_beyond_float16_are_refused(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"][3] = 70000.0

    checkpoint = convert.open_checkpoint(rewrite("llama", tmp_path, change))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values beyond float16's 65504; use bfloat16"):
        load_flat(checkpoint, dtype=np.float16)


def test_missing_unknown_and_misshaped_tensors_are_all_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["model.norm.weight"] = np.zeros(63, np.float32)

    with pytest.raises(ValueError, match="does not hold a llama model") as caught:
        convert.open_checkpoint(rewrite("llama", tmp_path, change))
    message = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in message
    assert "unknown tensors: model.layers.0.self_attn.q_proj.bias" in message
    assert "mis-shaped tensors: model.norm.weight is [63], expected [64]" in message


def test_long_lists_are_cut(tmp_path):
    def change(tensors):
        tensors |= {f"extra.{i}": np.zeros(1, np.float32) for i in range(25)}

    with pytest.raises(ValueError, match=r"extra\.\d+ and 15 more"):
        convert.open_checkpoint(rewrite("llama", tmp_path, change))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path, shards=2)
    tensors = tiny.weights("llama")
    names = list(tensors)
    tiny.save_file({n: tensors[n] for n in names[: len(names) // 2 + 1]}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"tensors stored twice: .*\(model-00001-of-00002.* and model-00002-of"):
        convert.open_checkpoint(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lists files that are not there: model-00002-of-00002"):
        convert.open_checkpoint(folder)


def test_integer_weights_are_refused(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = np.ones(64, np.int8)

    with pytest.raises(ValueError, match=r"unsupported dtypes: model.norm.weight \(I8\); supported: F64, F32, F16"):
        convert.open_checkpoint(rewrite("llama", tmp_path, change))


def test_rotary_buffers_are_ignored(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    assert convert.open_checkpoint(rewrite("llama", tmp_path, change)).config.num_layers == 3


def test_tied_head_stored_too_is_ignored_if_equal(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    checkpoint = convert.open_checkpoint(rewrite("qwen3", tmp_path, change))
    assert checkpoint.config.tied_head
    assert "head.weight" not in load_flat(checkpoint)


def test_tied_head_that_differs_is_not_tied(tmp_path, caplog):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][250, 63] += 1

    with caplog.at_level(logging.WARNING):
        checkpoint = convert.open_checkpoint(rewrite("qwen3", tmp_path, change))
    assert not checkpoint.config.tied_head
    assert "lm_head.weight differ: not tied" in caplog.text
    loaded = load_flat(checkpoint)
    difference = np.asarray(loaded["head.weight"]).T - np.asarray(loaded["embed.weight"])
    assert np.argwhere(difference).tolist() == [[250, 63]]


def test_tied_head_alone_is_the_embedding(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    checkpoint = convert.open_checkpoint(rewrite("qwen3", tmp_path, change))
    embedding = tiny.weights("qwen3")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(load_flat(checkpoint)["embed.weight"]), embedding)


def test_untied_model_without_a_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing tensors: lm_head\.weight"):
        convert.open_checkpoint(rewrite("llama", tmp_path, lambda tensors: tensors.pop("lm_head.weight")))


def test_abstract_tree_must_match(tmp_path):
    checkpoint = opened("llama", tmp_path)
    abstract, physical = abstract_tree(checkpoint.config, 2)
    with pytest.raises(ValueError, match=r"not those that the config declares: embed\.weight \[252, 64\]"):
        convert.load(checkpoint, abstract, checkpoint.config, progress=False)
    del abstract["final_norm"]
    with pytest.raises(ValueError, match=r"do not have the same parameters: final_norm\.scale"):
        convert.load(checkpoint, abstract, physical, progress=False)


def test_end_ids_come_from_generation_config(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    config = convert.open_checkpoint(folder).config
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 9))


def test_paths_that_hold_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        convert.open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint: no config\.json, no jaxinfer\.json, no \.gguf"):
        convert.open_checkpoint(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"is a file but not a \.gguf"):
        convert.open_checkpoint(tmp_path / "weights.bin")
    (tmp_path / "config.json").write_text(json.dumps(tiny.CASES["llama"]))
    with pytest.raises(
        FileNotFoundError,
        match=r"has no model\.safetensors, no model\.safetensors\.index\.json, no pytorch_model\.bin, no",
    ):
        convert.open_checkpoint(tmp_path)


def test_progress_shows_bytes(tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __init__(self, **options):
            shown.append(options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, nbytes):
            shown.append(nbytes)

    monkeypatch.setattr("convert.loading.tqdm", Bar)
    checkpoint = opened("llama", tmp_path)
    weights = load_flat(checkpoint)
    total = sum(array.nbytes for array in weights.values())
    assert shown[0]["disable"] is True
    assert sum(shown[1:]) == shown[0]["total"] == total
    shown.clear()
    convert.save_native(checkpoint, tmp_path / "native")
    # Shown where there is a terminal, with what tqdm shows by default: bytes, their rate and the time left.
    assert shown[0] == {"total": total, "unit": "B", "unit_scale": True, "desc": "converting", "disable": None}
    assert sum(shown[1:]) == total
