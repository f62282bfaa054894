"""GGUF files equal the safetensors they were made from; quantized rows equal the gguf package's own reading."""

import dataclasses
import math

import gguf
import numpy as np
import pytest

import convert
from convert.families import model_config
from tests import tiny
from tests.convert.gguf_files import gguf_tensors, write_gguf
from tests.convert.meshed import assert_same, load_flat

SCALING = "llama.rope.scaling."


def write_case(name, path, tensors=None, metadata=(), **fields):
    return write_gguf(path, {**tiny.CASES[name], **fields}, tensors or gguf_tensors(name), metadata)


@pytest.mark.parametrize("name", ["llama", "llama_biases", "llama_one_kv_head", "mistral_full", "qwen2", "qwen3"])
def test_float32_equals_safetensors(name, tmp_path):
    hugging_face = convert.open_checkpoint(tiny.write_checkpoint(name, tmp_path / "hf"))
    checkpoint = convert.open_checkpoint(write_case(name, tmp_path / "tiny.gguf"))
    assert (checkpoint.format, checkpoint.dtype) == ("gguf", "float32")
    same = {"family": checkpoint.config.family, "norm_eps": checkpoint.config.norm_eps}
    assert checkpoint.config == dataclasses.replace(hugging_face.config, **same)
    assert checkpoint.config.norm_eps == pytest.approx(hugging_face.config.norm_eps, rel=1e-6)
    assert_same(load_flat(checkpoint), load_flat(hugging_face))


def test_folder_with_one_file_opens_and_with_two_does_not(tmp_path):
    write_case("qwen2", tmp_path / "a.gguf")
    assert convert.open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    write_case("qwen2", tmp_path / "b.gguf")
    with pytest.raises(FileNotFoundError, match=r"holds 2 \.gguf files"):
        convert.open_checkpoint(tmp_path)


# One tensor of each type: rows of 256, as the K types need.
WIDE = {**tiny.CASES["qwen2"], "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 67}
SIMPLE = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def raw_rows(kind, rows, rng):
    """Rows of 256 in a type: quantized by the gguf package, or for the K types, random blocks with sane scales."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in SIMPLE:
        return gguf.quantize(rng.standard_normal((rows, 256), np.float32), number)
    blocks = rng.integers(0, 256, (rows, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    scales = rng.uniform(0.01, 0.02, (rows, 2)).astype(np.float16).view(np.uint8)
    if kind in ("Q3_K", "Q6_K"):
        blocks[:, -2:] = scales[:, :2]
    elif kind == "Q2_K":
        blocks[:, -4:] = scales
    elif kind.startswith("IQ"):
        blocks[:, :2] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks


@pytest.mark.parametrize("kind", [*SIMPLE, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_S", "IQ4_XS"])
def test_quantized_types(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 8192)  # several reads for each tensor
    rng = np.random.default_rng(5)
    zeros = {name: np.zeros(256, np.float32) for name in ("attn_norm.weight", "ffn_norm.weight", "attn_q.bias")}
    zeros |= {name: np.zeros(64, np.float32) for name in ("attn_k.bias", "attn_v.bias")}
    tensors = {f"blk.0.{name}": value for name, value in zeros.items()} | {
        "output_norm.weight": zeros["ffn_norm.weight"]
    }
    rows = {
        "attn_q": 256,
        "attn_k": 64,
        "attn_v": 64,
        "attn_output": 256,
        "ffn_gate": 256,
        "ffn_up": 256,
        "ffn_down": 256,
    }
    rows = {f"blk.0.{name}.weight": count for name, count in rows.items()} | {"token_embd.weight": 67}
    quantized = {name: (gguf.GGMLQuantizationType[kind], raw_rows(kind, count, rng)) for name, count in rows.items()}
    path = write_gguf(tmp_path / "wide.gguf", WIDE, tensors | dict.fromkeys(rows), quantized=quantized)
    checkpoint = convert.open_checkpoint(path)
    assert checkpoint.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    loaded = {key: np.asarray(value) for key, value in load_flat(checkpoint).items()}
    np.testing.assert_array_equal(loaded["embed.weight"], stored["token_embd.weight"])
    np.testing.assert_array_equal(loaded["layers.0.mlp.down"], stored["blk.0.ffn_down.weight"].T)
    np.testing.assert_array_equal(loaded["layers.0.mlp.gate_up"][:, 1], stored["blk.0.ffn_up.weight"].T)
    keys = loaded["layers.0.attention.qkv"][:, :, 4].reshape(256, -1).T
    np.testing.assert_array_equal(keys, stored["blk.0.attn_k.weight"])
    assert loaded["embed.weight"].std() > 0.01


def rope_of(tmp_path, metadata, tensors=None, **fields):
    return convert.open_checkpoint(
        write_case(
            "llama", tmp_path / "rope.gguf", tensors, [(SCALING + key, value) for key, value in metadata], **fields
        )
    ).config.rope


def test_linear_and_yarn_scaling(tmp_path):
    linear = rope_of(tmp_path, [("type", "linear"), ("factor", 4.0)])
    assert linear == model_config(tiny.CASES["llama_linear"]).rope
    yarn = rope_of(tmp_path, [("type", "yarn"), ("factor", 8.0), ("original_context_length", 32), ("finetuned", True)])
    assert yarn == model_config(tiny.CASES["llama_yarn"]).rope


def llama3_divisors(theta, head_dim, factor, low, high, original):
    """llama.cpp's table, frequency by frequency."""
    table = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        divisor = 1.0 if wavelength < original / high else factor
        if original / high <= wavelength <= original / low:
            divisor = 1 / ((1 - smooth) / factor + smooth)
        table.append(divisor)
    return np.array(table, np.float32)


def test_llama3_scaling_is_recognised_from_its_table(tmp_path):
    table = llama3_divisors(500_000.0, 128, 32.0, 1.0, 4.0, 8192)
    tensors = {**gguf_tensors("llama_one_kv_head"), "rope_freqs.weight": table}
    for name in [name for name in tensors if "attn_" in name and "norm" not in name]:
        rows = {"attn_q": 8, "attn_output": 8}.get(name.split(".")[2], 1) * 128
        tensors[name] = np.zeros((64, rows) if "output" in name else (rows, 64), np.float32)
    path = write_case(
        "llama_one_kv_head", tmp_path / "l3.gguf", tensors, rope_theta=500_000.0, head_dim=128, model_type="llama"
    )
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = model_config({**tiny.CASES["llama_one_kv_head"], "rope_theta": 500_000.0, "rope_scaling": scaling}).rope
    rope = convert.open_checkpoint(path).config.rope
    assert rope.factor == pytest.approx(expected.factor, rel=1e-6)
    assert dataclasses.replace(rope, factor=expected.factor) == expected


def test_other_frequency_tables_are_refused(tmp_path):
    tensors = {**gguf_tensors("llama"), "rope_freqs.weight": np.array([1, 2.5, 3, 9], np.float32)}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not a table of Llama 3\.1's scaling"):
        convert.open_checkpoint(write_case("llama", tmp_path / "l.gguf", tensors))


def test_end_ids(tmp_path):
    path = write_case("llama", tmp_path / "e.gguf", metadata=[("tokenizer.ggml.eot_token_id", 7)])
    assert convert.open_checkpoint(path).config.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (("llama.expert_count", 8), "'expert_count' is 8; only 0"),
        (("llama.attention.sliding_window", 4096), "'attention.sliding_window' is 4096"),
        (("llama.logit_scale", 2.0), "fields not understood: 'logit_scale'"),
        (("split.count", 3), "is one of 3 parts"),
        ((SCALING + "type", "longrope"), "'longrope', which is not supported; supported: none, linear, yarn"),
        ((SCALING + "yarn_log_multiplier", 0.1), "not understood: 'rope.scaling.yarn_log_multiplier'"),
        ((SCALING + "attn_factor", 2.0), "'rope.scaling.attn_factor' is 2.0"),
    ],
)
def test_metadata_refused(metadata, message, tmp_path):
    path = write_case("llama", tmp_path / "bad.gguf", metadata=[metadata])
    with pytest.raises(ValueError, match=message):
        convert.open_checkpoint(path)


def test_architecture_type_and_tensors_refused(tmp_path):
    with pytest.raises(ValueError, match="architecture 'gemma' is not supported; supported: llama, qwen2, qwen3"):
        convert.open_checkpoint(write_case("qwen2", tmp_path / "g.gguf", model_type="gemma"))
    tensors = gguf_tensors("qwen2")
    raw = np.zeros((251, 54), np.uint8)
    quantized = {"token_embd.weight": (gguf.GGMLQuantizationType.TQ1_0, raw)}
    path = write_gguf(tmp_path / "q.gguf", tiny.CASES["qwen2"], tensors, quantized=quantized)
    with pytest.raises(
        ValueError, match=r"not supported: token_embd\.weight \(TQ1_0\); supported: F32, F16, BF16, Q8_0"
    ):
        convert.open_checkpoint(path)
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ValueError, match=r"missing tensors: blk\.1\.ffn_up\.weight"):
        convert.open_checkpoint(write_case("qwen2", tmp_path / "m.gguf", tensors))


def test_damaged_files_are_refused(tmp_path):
    whole = write_case("qwen2", tmp_path / "w.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (len(whole) - 5000, 600):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="if it is cut off or damaged, download it again"):
            convert.open_checkpoint(cut)
    cut.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ValueError, match="is not a GGUF file"):
        convert.open_checkpoint(cut)
    cut.write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(ValueError, match=r"cannot be read .*version 1"):
        convert.open_checkpoint(cut)


def test_without_the_gguf_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    path = write_case("qwen2", tmp_path / "w.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxinfer\[gguf\]'"):
        convert.open_checkpoint(path)
