"""Native checkpoints: bit-exact, restored on any mesh, written completely or not at all."""

import json
import re
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from jax.sharding import NamedSharding, PartitionSpec

import convert
from convert.__main__ import main
from convert.export import save_safetensors
from convert.manifest import FORMAT_VERSION
from convert.native import _chunk
from jaxinfer.config import Quantization
from jaxinfer.parameters import declare, flatten
from meshes import build_mesh
from tests import tiny
from tests.convert.meshed import assert_same, load_flat


@pytest.fixture
def source(tmp_path):
    """Two kv heads, an odd vocabulary, every bias."""
    return convert.open_checkpoint(tiny.write_checkpoint("llama_biases", tmp_path / "hf"))


def test_round_trip_on_meshes_of_every_size(source, tmp_path):
    native = convert.open_checkpoint(convert.save_native(source, tmp_path / "native", progress=False))
    assert (native.format, native.dtype, native.config) == ("native", "float32", source.config)
    for tensor in (1, 2, 8):
        assert_same(load_flat(native, tensor), load_flat(source, tensor))


def test_untied_head_round_trips(tmp_path):
    source = convert.open_checkpoint(tiny.write_checkpoint("qwen2_windows", tmp_path / "hf"))
    native = convert.open_checkpoint(convert.save_native(source, tmp_path / "native", progress=False))
    assert native.config == source.config
    for tensor in (1, 4):
        assert_same(load_flat(native, tensor), load_flat(source, tensor))


def test_dtype_is_kept_or_chosen(tmp_path):
    source = convert.open_checkpoint(tiny.write_checkpoint("qwen3", tmp_path / "hf", dtype="bfloat16"))
    kept = convert.open_checkpoint(convert.save_native(source, tmp_path / "kept", progress=False))
    chosen = convert.open_checkpoint(convert.save_native(source, tmp_path / "chosen", dtype="float32", progress=False))
    assert (kept.dtype, chosen.dtype) == ("bfloat16", "float32")
    assert_same(load_flat(kept, dtype=ml_dtypes.bfloat16), load_flat(source, dtype=ml_dtypes.bfloat16))
    assert_same(load_flat(kept), load_flat(chosen))


def test_values_beyond_float16_are_refused(tmp_path):
    tensors = tiny.weights("llama")
    tensors["model.norm.weight"][3] = 70_000.0
    tiny.write_config(tiny.CASES["llama"], tmp_path / "hf")
    tiny.write_safetensors(tensors, tmp_path / "hf")
    native = convert.save_native(convert.open_checkpoint(tmp_path / "hf"), tmp_path / "native", progress=False)
    with pytest.raises(ValueError, match=r"final_norm\.scale has values beyond float16's 65504; use bfloat16"):
        load_flat(convert.open_checkpoint(native), dtype=np.float16)


def test_pieces_are_those_of_a_mesh_and_not_too_large(monkeypatch):
    """151643 is a prime, and so are its pieces' rows; 4 kv heads leave a factor of 2 to the inputs."""

    def piece(*shape, axis):
        where = NamedSharding(build_mesh(), PartitionSpec(*[None] * axis, "tensor"))
        return _chunk(jax.ShapeDtypeStruct(shape, np.float32, sharding=where))

    assert piece(4096, 2, 14336, axis=2) == (4096, 2, 1792)
    assert piece(3584, 4, 9, 128, axis=1) == (1792, 1, 9, 128)
    assert piece(151643, 3584, axis=0) == (151643, 56)
    assert piece(32, 8, axis=0) == (32, 8)


def test_small_batches_restore_the_same(source, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.native._BATCH_BYTES", 1)
    native = convert.open_checkpoint(convert.save_native(source, tmp_path / "native", progress=False))
    assert_same(load_flat(native, 2), load_flat(source, 2))


def test_it_lists_its_tensors(source, tmp_path):
    native = convert.open_checkpoint(convert.save_native(source, tmp_path / "native", progress=False))
    shapes = {path: info.shape for path, info in native.tensors.items()}
    assert shapes == {path: parameter.shape for path, parameter in flatten(declare(source.config))}
    with pytest.raises(ValueError, match="is a native checkpoint, whose arrays are read by"):
        native.read("embed.weight", np.float32)
    with pytest.raises(ValueError, match="is a native checkpoint already"):
        convert.save_native(native, tmp_path / "again")


def test_a_newer_format_is_refused(source, tmp_path):
    folder = convert.save_native(source, tmp_path / "native", progress=False)
    manifest = json.loads((folder / "jaxinfer.json").read_text())
    (folder / "jaxinfer.json").write_text(json.dumps({**manifest, "format_version": FORMAT_VERSION + 1}))
    with pytest.raises(ValueError, match=f"format version {FORMAT_VERSION + 1}.*reads up to {FORMAT_VERSION}; upgrade"):
        convert.open_checkpoint(folder)


def test_destination_is_refused_or_replaced(source, tmp_path):
    target = tmp_path / "native"
    convert.save_native(source, target, progress=False)
    with pytest.raises(FileExistsError, match="exists; choose another place, or pass --force"):
        convert.save_native(source, target, progress=False)
    convert.save_native(source, target, dtype="bfloat16", force=True, progress=False)
    assert convert.open_checkpoint(target).dtype == "bfloat16"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not a native checkpoint, so it is not replaced"):
        convert.save_native(source, precious, force=True, progress=False)
    with pytest.raises(ValueError, match="dtype 'int4' is not supported; supported: float32"):
        convert.save_native(source, tmp_path / "x", dtype="int4")


def test_what_is_read_is_not_replaced(source, tmp_path):
    native = convert.save_native(source, tmp_path / "native", progress=False)
    inner = tiny.write_checkpoint("llama_one_kv_head", native / "inner")
    (tmp_path / "link").symlink_to(inner)
    int8 = {"quantization": Quantization("int8"), "force": True, "progress": False}
    for read in (native, inner, tmp_path / "link"):
        for save, options in ((convert.save_native, int8), (save_safetensors, {"force": True})):
            with pytest.raises(FileExistsError, match=r"is, or holds, .*, which would be lost; choose another place"):
                save(convert.open_checkpoint(read), native, **options)
    assert convert.open_checkpoint(inner).format == "safetensors"


def test_a_disk_without_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr("convert.destination.shutil.disk_usage", lambda path: full)
    for save in (convert.save_native, save_safetensors):
        with pytest.raises(OSError, match=r"0\.\d MB are to be written, and 0\.1 MB are free on the disk of"):
            save(source, tmp_path / "deep" / "x", progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]
    partial = tmp_path / ".x.partial"
    partial.mkdir()
    (partial / "kept").write_bytes(bytes(2_000_000))
    convert.save_native(source, tmp_path / "x", progress=False)


@pytest.mark.parametrize("damaged", ["[]", '{"format_version": 1}', '{"format_version": "1"}', "{"])
def test_a_damaged_manifest_is_refused(damaged, tmp_path):
    (tmp_path / "jaxinfer.json").write_text(damaged)
    with pytest.raises(ValueError, match=r"jaxinfer\.json"):
        convert.open_checkpoint(tmp_path)


def test_a_plain_orbax_checkpoint_is_written(source, tmp_path):
    folder = convert.save_native(source, tmp_path / "native", progress=False)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(folder / "weights")
    expected = load_flat(source)
    assert arrays.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(arrays[path], np.asarray(array), err_msg=path)


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {f"t{i}": i for i in range(251)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t2").save_pretrained(folder)


def test_command_line(source, tmp_path):
    write_tokenizer(source.path)
    target = tmp_path / "made" / "native"
    result = CliRunner().invoke(main, [str(source.path), str(target), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert f"{target}: llama, 3 layers, bfloat16, " in result.output
    assert "MB, with tokenizer" in result.output
    assert convert.open_checkpoint(target).dtype == "bfloat16"
    assert (target / "tokenizer" / "tokenizer.json").exists()
    result = CliRunner().invoke(main, [str(source.path), str(target)])
    assert result.exit_code == 1
    assert "exists; choose another place, or pass --force" in result.output


def test_command_line_without_a_tokenizer(source, tmp_path, caplog):
    result = CliRunner().invoke(main, [str(source.path), str(tmp_path / "native")])
    assert result.exit_code == 0, result.output
    assert "without tokenizer" in result.output
    assert "no tokenizer is saved" in caplog.text


def test_command_line_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(main, [str(tmp_path / "nowhere"), str(tmp_path / "native")])
    assert result.exit_code == 1
    assert "Error: no such model" in result.output
    assert "Traceback" not in result.output


def test_opening_and_help_do_not_import_jax(source):
    code = (
        "import sys, convert, convert.__main__ as m\n"
        f"convert.open_checkpoint(convert.resolve({str(source.path)!r}))\n"
        "try: m.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert not {'jax', 'transformers', 'torch'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "SRC is a folder with config.json" in result.stdout


def test_the_examples_of_the_help_are_commands(tmp_path):
    """Their options are there, and go together."""
    text = CliRunner().invoke(main, ["--help"]).output
    examples = re.findall(r"^ +python -m convert (.*)$", text, re.MULTILINE)
    assert len(examples) >= 5
    (tmp_path / "text.txt").touch()
    for example in examples:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr("convert.__main__.resolve", lambda source: tmp_path / "nowhere")
            result = CliRunner().invoke(main, example.split())
        assert result.exit_code == 1, result.output  # 2 for a mistake on the command line
        assert "no such checkpoint" in result.output
