"""Hugging Face folders out: bit for bit what went in, directly or through a native checkpoint."""

import json

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open

import convert
from convert.__main__ import main
from convert.safetensors_writer import Outgoing, write
from convert.tensors import whole
from jaxinfer.config import Quantization
from tests import tiny
from tests.convert import quantized_files, torch_files
from tests.convert.meshed import assert_same, load_flat
from tests.convert.test_native import write_tokenizer


def tensors_in(folder):
    """Name → array, as safetensors' own library reads them."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama_biases", "qwen3", "qwen2_windows", "gpt2", "bloom", "olmoe"])
def test_there_and_back_through_a_native_checkpoint(name, dtype, tmp_path):
    folder = tiny.write_checkpoint(name, tmp_path / "hf", dtype=dtype)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    native = convert.save_native(convert.open_checkpoint(folder), tmp_path / "native", progress=False)
    back = convert.save_safetensors(convert.open_checkpoint(native), tmp_path / "back", progress=False)
    assert_equal(tensors_in(back), tensors_in(folder))
    for file in ("config.json", "generation_config.json"):
        assert json.loads((back / file).read_text()) == json.loads((folder / file).read_text())
    assert convert.open_checkpoint(back).config == convert.open_checkpoint(folder).config


@pytest.mark.parametrize("name", tiny.ALL_CASES)
def test_every_family_s_tensors_are_read_back_out_of_our_arrays(name, tmp_path):
    checkpoint = convert.open_checkpoint(tiny.write_checkpoint(name, tmp_path))
    for path, source in checkpoint.sources.items():
        slots = source.transform(checkpoint.read(path, np.float32), checkpoint.config)
        for tensor, slot in zip(source.names, slots, strict=True):
            np.testing.assert_array_equal(slot.read(), whole(checkpoint.reader, tensor), err_msg=tensor)


def test_pickled_weights_become_safetensors_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 5000)
    tensors = {name: array.astype(np.float16) for name, array in tiny.weights("llama").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)  # each keeps its own
    tiny.write_config(tiny.CASES["llama"], tmp_path / "hf")
    torch_files.write(tmp_path / "hf" / "pytorch_model.bin", tensors)
    checkpoint = convert.open_checkpoint(tmp_path / "hf")
    back = convert.save_safetensors(checkpoint, tmp_path / "back", progress=False, shard_bytes=70_000)
    assert_equal(tensors_in(back), tensors)
    files = sorted(back.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert max(file.stat().st_size for file in files) < 80_000
    assert_same(load_flat(convert.open_checkpoint(back)), load_flat(checkpoint))


def test_another_dtype_is_said_in_the_config(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path / "hf")
    back = convert.save_safetensors(convert.open_checkpoint(folder), tmp_path / "x", dtype="bfloat16", progress=False)
    assert_equal(tensors_in(back), {n: array.astype(ml_dtypes.bfloat16) for n, array in tiny.weights("llama").items()})
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_quantized_weights_are_written_as_the_floats_they_mean(tmp_path):
    tensors, parts = tiny.weights("llama"), {}
    name = "model.layers.0.self_attn.q_proj"
    parts, meant = quantized_files.gptq(64, 64, np.random.default_rng(0))
    del tensors[f"{name}.weight"]
    config = {"quant_method": "gptq", "bits": 4}
    tiny.write_config({**tiny.CASES["llama"], "quantization_config": config}, tmp_path / "hf")
    tiny.write_safetensors(tensors | {f"{name}{part}": array for part, array in parts.items()}, tmp_path / "hf")
    back = convert.save_safetensors(convert.open_checkpoint(tmp_path / "hf"), tmp_path / "back", progress=False)
    assert_equal(tensors_in(back), tensors | {f"{name}.weight": meant})
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_what_cannot_be_exported_is_refused(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path / "hf")
    source = convert.open_checkpoint(folder)
    with pytest.raises(ValueError, match="dtype 'int8' is not supported"):
        convert.save_safetensors(source, tmp_path / "x", dtype="int8")
    low = convert.save_native(source, tmp_path / "low", quantization=Quantization("int8"), progress=False)
    with pytest.raises(ValueError, match="is quantized to int8; export the original"):
        convert.save_safetensors(convert.open_checkpoint(low), tmp_path / "x")
    native = convert.save_native(source, tmp_path / "native", progress=False)
    (native / "huggingface" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        convert.save_safetensors(convert.open_checkpoint(native), tmp_path / "x")
    for force in (False, True):  # and no advice that would not help
        with pytest.raises(FileExistsError, match="which would be lost; choose another place"):
            convert.save_safetensors(source, folder, force=force)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_is_written_as_gptq(symmetric, tmp_path):
    """And read again as the same integers."""
    source = convert.open_checkpoint(tiny.write_checkpoint("llama", tmp_path / "hf", dtype="float16"))
    wanted = Quantization("int4", 32, symmetric)
    native = convert.save_native(source, tmp_path / "native", quantization=wanted, progress=False)
    back = convert.save_safetensors(convert.open_checkpoint(native), tmp_path / "back", progress=False)
    config = json.loads((back / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == ("gptq" if symmetric else "gptq_v2")
    found, name = tensors_in(back), "model.layers.0.self_attn.k_proj"
    assert not any(tensor.endswith("k_proj.weight") for tensor in found)
    shapes = {kind: (found[f"{name}.{kind}"].shape, found[f"{name}.{kind}"].dtype.name) for kind in GPTQ_TENSORS}
    assert shapes == GPTQ_TENSORS
    checkpoint = convert.open_checkpoint(back)
    assert checkpoint.quantization == wanted
    assert_same(
        *(load_flat(c, dtype=np.float16, quantization=wanted) for c in (checkpoint, convert.open_checkpoint(native)))
    )


GPTQ_TENSORS = {
    "qweight": ((8, 16), "int32"),
    "qzeros": ((2, 2), "int32"),
    "scales": ((2, 16), "float16"),
    "g_idx": ((64,), "int32"),
}


def test_int4_of_a_family_that_stores_inputs_first_is_refused(tmp_path):
    source = convert.open_checkpoint(tiny.write_checkpoint("gpt2", tmp_path / "hf"))
    low = convert.save_native(source, tmp_path / "low", quantization=Quantization("int4", 32), progress=False)
    with pytest.raises(ValueError, match=r"c_attn\.weight: not \[outputs, inputs\] in this family"):
        convert.save_safetensors(convert.open_checkpoint(low), tmp_path / "x", progress=False)


def test_values_beyond_float16_leave_nothing_behind(tmp_path):
    tensors = tiny.weights("llama")
    tensors["model.norm.weight"][3] = 70_000.0
    tiny.write_config(tiny.CASES["llama"], tmp_path / "hf")
    tiny.write_safetensors(tensors, tmp_path / "hf")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values beyond float16's 65504"):
        convert.save_safetensors(convert.open_checkpoint(tmp_path / "hf"), tmp_path / "x", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tensor_shorter_than_its_header_is_an_error(tmp_path):
    short = Outgoing("a", (4, 2), "F32", lambda: [np.zeros((3, 2), np.float32)])
    with pytest.raises(ValueError, match="a has 24 bytes; its header says 32"):
        write(tmp_path, [short], 1000, lambda nbytes: None)


def test_command_line(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path / "hf")
    write_tokenizer(folder)
    native, back = tmp_path / "native", tmp_path / "back"
    for arguments in ([folder, native], [native, back, "--format", "safetensors"]):
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
    assert f"{back}: llama, " in result.output
    assert_equal(tensors_in(back), tiny.weights("llama"))
    assert (back / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    result = CliRunner().invoke(main, [str(folder), "x", "--format", "safetensors", "--quantization", "int8"])
    assert "--quantization needs --format native" in result.output


def test_a_dry_run_prints_the_mapping_and_writes_nothing(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path / "hf", dtype="bfloat16")
    options = ["--dry-run", "--quantization", "int8"]
    result = CliRunner().invoke(main, [str(folder), str(tmp_path / "native"), *options])
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    lines = result.output.splitlines()
    assert lines[0] == "embed.weight [251, 64] bfloat16, 0.032 MB <- model.embed_tokens.weight [251, 64] BF16"
    assert (
        "layers.1.mlp.gate_up.values [2, 96, 64] int8, 0.012 MB <- model.layers.1.mlp.gate_proj.weight [96, 64] BF16, "
        "model.layers.1.mlp.up_proj.weight [96, 64] BF16"
    ) in lines
    total = 2 * sum(array.size for array in tiny.weights("llama").values()) / 1e6
    assert lines[-1].startswith(f"{folder}: {total:.1f} MB of tensors become 0.1 MB")


def test_a_dry_run_says_what_its_format_would_write_or_refuse(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path / "hf")
    native = convert.save_native(convert.open_checkpoint(folder), tmp_path / "native", progress=False)

    def invoke(*arguments):
        return CliRunner().invoke(main, [*map(str, arguments), "--dry-run"])

    result = invoke(native, tmp_path / "back", "--format", "safetensors", "--dtype", "float16")
    assert result.exit_code == 0, result.output
    *lines, total = result.output.splitlines()
    assert "model.layers.1.mlp.gate_proj.weight [96, 64] F16, 0.012 MB" in lines
    weights = tiny.weights("llama")
    assert {line.split()[0] for line in lines} == weights.keys()
    size = 2 * sum(array.size for array in weights.values()) / 1e6
    assert total == f"{native}: {len(weights)} tensors, {size:.1f} MB"
    assert "is a native checkpoint already; copy the folder" in invoke(native, tmp_path / "back").output
    assert "exists; choose another place, or pass --force" in invoke(folder, native).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "native"]
