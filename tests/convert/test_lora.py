"""LoRA adapters merged into their base."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import convert
from tests import tiny
from tests.convert import torch_files
from tests.convert.meshed import assert_same, load_flat

CONFIG = json.loads((Path(__file__).parent / "files" / "adapter_config.json").read_text())
"""As PEFT 0.21.2 writes it, with every field."""
Q, DOWN, EMBED = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.embed_tokens"


def factors(rank, outputs, inputs, seed):
    rng = np.random.default_rng(seed)
    return tuple((rng.random(shape) - 0.5).astype(np.float32) for shape in ((rank, inputs), (outputs, rank)))


def adapter(folder, tensors, **changes):
    """Write an adapter for the llama beside it."""
    folder.mkdir(exist_ok=True)
    base = tiny.write_checkpoint("llama", folder.parent / "base")
    config = {**CONFIG, "base_model_name_or_path": str(base), **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}": array for name, array in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def pair(module, a, b):
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def assert_loads_as(folder, changed):
    """changed: name → the whole weight."""
    floats = folder.parent / "floats"
    tiny.write_config(tiny.CASES["llama"], floats)
    tiny.write_safetensors({**tiny.weights("llama"), **changed}, floats)
    loaded, expected = load_flat(convert.open_checkpoint(folder)), load_flat(convert.open_checkpoint(floats))
    assert loaded.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_allclose(np.asarray(loaded[path]), np.asarray(array), rtol=0, atol=2e-6, err_msg=path)


def test_it_is_added_to_the_base(tmp_path, monkeypatch):
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 5000)
    weights, (a, b), (c, d) = tiny.weights("llama"), factors(4, 64, 64, 0), factors(2, 64, 96, 1)
    ranks = {"rank_pattern": {"layers.0.mlp.down_proj": 2, "down_proj": 3}, "eva_config": {"rho": 2.0}}
    folder = adapter(tmp_path / "lora", pair(Q, a, b) | pair(DOWN, c, d), lora_alpha=8, **ranks)
    changed = {
        f"{Q}.weight": weights[f"{Q}.weight"] + 2 * (b @ a),
        f"{DOWN}.weight": weights[f"{DOWN}.weight"] + 4 * (d @ c),
    }
    assert_loads_as(folder, changed)


def test_scaling_of_single_modules_and_by_the_root_of_the_rank(tmp_path):
    weights, (a, b), (c, d) = tiny.weights("llama"), factors(4, 64, 64, 0), factors(4, 64, 96, 1)
    options = {"lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"layers.0.mlp.down_proj": 3, "v_proj": 9}}
    folder = adapter(tmp_path / "lora", pair(Q, a, b) | pair(DOWN, c, d), **options)
    changed = {
        f"{Q}.weight": weights[f"{Q}.weight"] + 4 * (b @ a),
        f"{DOWN}.weight": weights[f"{DOWN}.weight"] + 1.5 * (d @ c),
    }
    assert_loads_as(folder, changed)


def test_transposed_bases_and_embeddings(tmp_path):
    weights, (a, b), (c, d) = tiny.weights("llama"), factors(4, 64, 251, 0), factors(4, 96, 64, 1)
    embedding = {f"{EMBED}.lora_embedding_A": a, f"{EMBED}.lora_embedding_B": b}
    folder = adapter(tmp_path / "lora", embedding | pair(DOWN, c, d), lora_alpha=4, fan_in_fan_out=True)
    changed = {
        f"{EMBED}.weight": weights[f"{EMBED}.weight"] + (b @ a).T,
        f"{DOWN}.weight": weights[f"{DOWN}.weight"] + (d @ c).T,
    }
    assert_loads_as(folder, changed)


def test_whole_modules_are_replaced(tmp_path):
    head, (a, b) = np.full((251, 64), 0.5, np.float32), factors(4, 64, 251, 0)
    tensors = {"lm_head.weight": head, f"{EMBED}.base_layer.weight": head + 1}
    tensors |= {f"{EMBED}.lora_embedding_A": a, f"{EMBED}.lora_embedding_B": b}
    folder = adapter(tmp_path / "lora", tensors, modules_to_save=["lm_head"], lora_alpha=4)
    assert_loads_as(folder, {"lm_head.weight": head, f"{EMBED}.weight": head + 1 + (b @ a).T})


def test_a_head_takes_its_place_beside_a_tied_embedding(tmp_path):
    head = np.full((251, 64), 0.5, np.float32)
    folder = adapter(tmp_path / "lora", {"lm_head.weight": head}, modules_to_save=["lm_head"])
    weights = tiny.weights("llama")
    del weights["lm_head.weight"]
    tiny.write_config({**tiny.CASES["llama"], "tie_word_embeddings": True}, tmp_path / "base")
    tiny.write_safetensors(weights, tmp_path / "base")
    assert_loads_as(folder, {"lm_head.weight": head})


def test_it_may_be_pickled_and_of_another_dtype(tmp_path):
    a, b = factors(4, 64, 64, 0)
    folder = adapter(tmp_path / "lora", pair(Q, a, b))
    expected = load_flat(convert.open_checkpoint(folder))
    (folder / "adapter_model.safetensors").unlink()
    torch_files.write(
        folder / "adapter_model.bin", {f"base_model.model.{n}": array for n, array in pair(Q, a, b).items()}
    )
    assert_same(load_flat(convert.open_checkpoint(folder)), expected)
    half = {n: array.astype(ml_dtypes.bfloat16) for n, array in pair(Q, a, b).items()}
    adapter(folder, half)
    low = np.asarray(load_flat(convert.open_checkpoint(folder))["layers.1.attention.qkv"])
    np.testing.assert_allclose(low, np.asarray(expected["layers.1.attention.qkv"]), atol=0.05)


def test_the_checkpoint_is_the_base_s(tmp_path):
    folder = adapter(tmp_path / "lora", pair(Q, *factors(4, 64, 64, 0)))
    checkpoint = convert.open_checkpoint(folder)
    assert (checkpoint.path, checkpoint.format, checkpoint.dtype) == (tmp_path / "base", "safetensors", "float32")
    tiny.write_checkpoint("qwen3", folder)  # a model with its own weights, whatever lies beside them
    assert convert.open_checkpoint(folder).config.family == "qwen3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3'; only 'LORA' is supported"),
        ({"use_dora": True}, "fields not understood: 'use_dora'"),
        ({"lora_bias": True}, "fields not understood: 'lora_bias'"),
        ({"bias": "all"}, "'bias' is 'all'"),
        ({"layer_replication": [[0, 2]]}, "fields not understood: 'layer_replication'"),
        ({"target_parameters": ["experts"]}, "fields not understood: 'target_parameters'"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' is 'pissa'"),
        ({"lora_alpha": "8"}, "'lora_alpha' is '8'; it must be a positive number"),
        ({"modules_to_save": "lm_head"}, "'modules_to_save' is 'lm_head'; it must be a list of names"),
        ({"r": 8}, r"the rank of model\.layers\.1.*q_proj is 8, but its factors have 4"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj is 2, but its factors have 4"),
        ({"alpha_pattern": {"q_proj": "8"}}, "'alpha_pattern' is .*; it must map patterns of names to numbers"),
        ({"alpha_pattern": {"(q_proj": 8}}, "'alpha_pattern' is .*; it must map patterns of names to numbers"),
        ({"base_model_name_or_path": None}, "'base_model_name_or_path' must name the model"),
    ],
)
def test_settings_that_are_not_handled_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert.open_checkpoint(adapter(tmp_path / "lora", pair(Q, *factors(4, 64, 64, 0)), **changes))


A, B = factors(4, 64, 64, 0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            pair("model.layers.9.self_attn.q_proj", A, B),
            r"has no such weights: model\.layers\.9.*q_proj\.weight \[64, 64",
        ),
        (pair(Q, A[:, :60].copy(), B), r"no such weights: model\.layers\.1\.self_attn\.q_proj\.weight \[64, 60\]"),
        (pair(Q, A[:3].copy(), B), r"the factors of model.*q_proj do not fit each other: \[3, 64\] and \[64, 4\]"),
        ({f"{Q}.lora_B.weight": B}, r"do not fit each other: nothing and \[64, 4\]"),
        ({f"{Q}.lora_A.weight": A[0].copy(), f"{Q}.lora_B.weight": B}, "do not fit each other"),
        ({"lm_head.weight": A}, r"no such weights: lm_head\.weight \[4, 64\]"),
        (pair(Q, A, B) | {f"{Q}.lora_magnitude_vector": B[:, 0].copy()}, "no such weights: .*magnitude"),
        (pair(Q, A.astype(np.int8), B), r"not weights of an adapter: base_model.*lora_A"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert.open_checkpoint(adapter(tmp_path / "lora", tensors))


def test_names_without_the_prefix_are_refused(tmp_path):
    folder = adapter(tmp_path / "lora", {})
    save_file(pair(Q, A, B), folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="not weights of an adapter: model"):
        convert.open_checkpoint(folder)


def test_absent_files_are_named(tmp_path):
    folder = adapter(tmp_path / "lora", pair(Q, A, B))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no adapter_model\.safetensors and no adapter_model\.bin"):
        convert.open_checkpoint(folder)
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"lora is an adapter for .*base, which holds no config\.json"):
        convert.open_checkpoint(folder)
