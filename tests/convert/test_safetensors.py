"""Safetensors files: every dtype, and every damage a clear error."""

import json
import logging
import struct

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.safetensors_reader import SafetensorsReader, read_headers
from convert.tensors import has_nan
from tests import tiny
from tests.convert.meshed import load_flat

DTYPES = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
}


def write(path, header, data=b""):
    """header: a dict, or its bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("name", DTYPES)
def test_float_dtypes(name, tmp_path):
    array = np.linspace(-3, 3, 24).reshape(4, 6).astype(DTYPES[name])
    header = {"x": entry([4, 6], 0, array.nbytes, name), "__metadata__": {"format": "pt"}}
    write(tmp_path / "model.safetensors", header, array.tobytes())
    reader = SafetensorsReader(tmp_path)
    assert reader.tensors["x"].nbytes == array.nbytes
    rows = reader.read("x", 1, 3)
    assert rows.dtype == array.dtype
    np.testing.assert_array_equal(rows, array[1:3])


def test_eight_bit_floats_are_loaded_as_the_numbers_they_are(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path)
    tensors = tiny.weights("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tiny.write_safetensors(tensors, folder)
    loaded = load_flat(convert.open_checkpoint(folder))["layers.0.mlp.down"]
    np.testing.assert_array_equal(np.asarray(loaded), tensors[name].astype(np.float32).T)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": entry([2, 3], 0, 10 * 2**30)}, "x is said to take bytes 0 to 10737418240, but only 24 are there"),
        ({"x": entry([2, 3], 4, 28)}, "x is said to take bytes 4 to 28, but only 24 are there"),
        ({"x": entry([2, 3], 24, 0)}, "x is said to take bytes 24 to 0"),
        ({"x": entry([2, 4], 0, 24)}, r"x has 24 bytes, but F32 \[2, 4\] takes 32"),
        ({"x": entry([2**40, 2**40], 0, 24)}, "x has 24 bytes, but F32"),
        ({"x": entry([2, 3], 0, 24, "F4")}, "x is of the unknown dtype F4; known: F64"),
        ({"x": entry([-2, -3], 0, 24)}, "the header of x is damaged"),
        ({"x": entry([2.0, 3], 0, 24)}, "the header of x is damaged"),
        ({"x": entry([2, 3], 0, "24")}, "the header of x is damaged"),
        ({"x": {"dtype": "F32", "shape": [2, 3]}}, "the header of x is damaged"),
        ({"x": []}, "the header of x is damaged"),
        ([], "its header is no JSON object"),
        ({"x": entry([3], 0, 12), "y": entry([4], 8, 24)}, "x and y overlap"),
        (b'{"x": {}, "y": {}, "x": {}}', "its header is damaged: has keys twice: x$"),
        (b'{"x": {"dtype": "F32"', "its header is damaged: "),
        (b"[" * 100_000, "its header is damaged: "),
        (b"\xff\xfe\xfd", "its header is damaged: "),
    ],
)
def test_damaged_headers_are_refused(header, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_headers(write(tmp_path / "x.safetensors", header, bytes(24)))


def test_truncated_files_are_refused(tmp_path):
    data = write(tmp_path / "x.safetensors", {"x": entry([2, 3], 0, 24)}, bytes(24)).read_bytes()
    for length in range(len(data)):
        (tmp_path / "x.safetensors").write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut short"):
            read_headers(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**63) + data[8:])
    with pytest.raises(ValueError, match="of which a header is to take 9223372036854775808"):
        read_headers(tmp_path / "x.safetensors")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    file = write(tmp_path / "model.safetensors", {"x": entry([2, 3], 0, 24)}, bytes(24))
    reader = SafetensorsReader(tmp_path)
    file.write_bytes(file.read_bytes()[:-4])
    np.testing.assert_array_equal(reader.read("x", 0, 1), np.zeros((1, 3)))
    with pytest.raises(ValueError, match="ends within a tensor"):
        reader.read("x", 0, 2)


def index(folder, text):
    tiny.write_checkpoint("llama", folder, shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b"])
def test_an_index_may_not_leave_its_folder(name, tmp_path):
    folder = index(tmp_path / "model", json.dumps({"weight_map": {"model.norm.weight": name}}))
    tiny.write_safetensors({"x": np.zeros(3, np.float32)}, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "secret.safetensors")
    with pytest.raises(ValueError, match="names files outside its folder: "):
        convert.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "index.json: Expecting property name"),
        ("[]", "'weight_map' must map names of tensors to names of files"),
        ('{"weight_map": {}}', "'weight_map' must map"),
        ('{"weight_map": {"a": 3}}', "'weight_map' must map"),
        ('{"weight_map": {"a": "x", "a": "x"}}', "has keys twice: a"),
    ],
)
def test_a_damaged_index_is_refused(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert.open_checkpoint(index(tmp_path, text))


def test_one_file_beside_an_index_of_others_is_refused(tmp_path):
    tiny.write_checkpoint("llama_one_kv_head", tmp_path, shards=2)
    tiny.write_checkpoint("llama_one_kv_head", tmp_path)
    with pytest.raises(ValueError, match=r"holds model\.safetensors and, beside it, .*: which are the weights\?"):
        convert.open_checkpoint(tmp_path)
    for shard in tmp_path.glob("model-*"):
        shard.unlink()
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert len(convert.open_checkpoint(tmp_path).tensors) == len(names)


def test_an_index_with_swapped_names_is_refused(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path, shards=2)
    file = folder / "model.safetensors.index.json"
    values = json.loads(file.read_text())
    files = values["weight_map"]
    first, *_, last = files
    files[first], files[last] = files[last], files[first]
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"does not agree with the files: model\.embed.*00001.*, not .*00002"):
        convert.open_checkpoint(folder)


def test_swapped_tensors_are_refused_by_their_shapes(tmp_path):
    folder, tensors = tiny.write_checkpoint("llama", tmp_path), tiny.weights("llama")
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    tensors[q], tensors[k] = tensors[k], tensors[q]
    tiny.write_safetensors(tensors, folder)
    with pytest.raises(ValueError, match=r"q_proj\.weight is \[16, 64\], expected \[64, 64\]"):
        convert.open_checkpoint(folder)


def test_config_with_a_field_twice_is_refused(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[:-2] + ', "rope_theta": 5.0, "rope_theta": 6.0}')
    with pytest.raises(ValueError, match=r"config\.json: has keys twice: rope_theta"):
        convert.open_checkpoint(folder)


def test_config_of_another_kind_is_refused(tmp_path):
    (tiny.write_checkpoint("llama", tmp_path) / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds no object"):
        convert.open_checkpoint(tmp_path)
    tiny.write_checkpoint("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config\.json holds no object"):
        convert.open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(), (3, 0), (0, 3), (7,)])
def test_tied_weights_of_odd_shapes_are_refused(shape, tmp_path):
    """They are compared before their shapes are known to be right."""
    odd = np.zeros(shape, np.float32)
    tensors = tiny.weights("qwen3") | {"model.embed_tokens.weight": odd, "lm_head.weight": odd}
    tiny.write_config(tiny.CASES["qwen3"], tmp_path)
    tiny.write_safetensors(tensors, tmp_path)
    with pytest.raises(ValueError, match=r"mis-shaped tensors: model\.embed_tokens\.weight is \["):
        convert.open_checkpoint(tmp_path)


def test_nan_is_warned_of_once_a_tensor(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 1000)
    folder, tensors = tiny.write_checkpoint("llama", tmp_path), tiny.weights("llama")
    tensors["model.layers.1.mlp.up_proj.weight"][[0, 50], [3, 7]] = np.nan
    tensors["model.norm.weight"][0] = np.inf
    tiny.write_safetensors(tensors, folder)
    with caplog.at_level(logging.WARNING):
        load_flat(convert.open_checkpoint(folder))
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "model.layers.1.mlp.up_proj.weight holds NaN; every result that it touches will be NaN"
    ]


@pytest.mark.parametrize("name", DTYPES)
def test_nan_is_told_from_the_largest_numbers(name):
    dtype = np.dtype(DTYPES[name])
    largest = ml_dtypes.finfo(dtype).max
    clean = np.array([[0.0, -0.0, largest, -largest, 1.0]]).astype(dtype)
    if name != "F8_E4M3":
        clean[0, 4] = -np.inf
    assert not has_nan(clean)
    assert not has_nan(clean[:0])
    for nan in (np.nan, -np.nan):
        assert has_nan(np.concatenate([clean, np.full_like(clean, nan)]))
