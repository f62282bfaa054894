"""PyTorch's files: read bit for bit, and refused without being run."""

import os
import pickle
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.tensors import whole
from convert.torch_pickle import read_pickle
from convert.torch_reader import TorchReader, read_headers
from tests import tiny
from tests.convert import torch_files
from tests.convert.meshed import assert_same, load_flat
from tests.convert.torch_files import dictionary, number, reference, tensor, text

WRITTEN_BY_TORCH = Path(__file__).parent / "files" / "torch.bin"
"""torch 2.13: an OrderedDict with `_metadata` of `arange(24).reshape(4, 6)` in many ways."""


def test_a_file_that_torch_wrote(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(WRITTEN_BY_TORCH.read_bytes())
    reader = TorchReader(tmp_path)
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = {
        "bf16": base.astype(ml_dtypes.bfloat16),
        "transposed": base.T,
        "parameter": base.astype(np.float16),
        "f8": base.astype(ml_dtypes.float8_e4m3fn),
        "slice": base[1:3, 2:5],
        "scalar": np.array(3),
        "shared": base,
        "u16": base.astype(np.uint16),
        "empty": np.zeros((0, 3), np.float32),
        "double": base.astype(np.float64),
    }
    assert reader.tensors.keys() == expected.keys()
    for name, array in expected.items():
        info, read = reader.tensors[name], whole(reader, name)
        assert (info.shape, info.nbytes, read.dtype) == (array.shape, array.nbytes, array.dtype), name
        np.testing.assert_array_equal(read, array, err_msg=name)
        assert read.flags.c_contiguous
    np.testing.assert_array_equal(reader.read("transposed", 2, 5), base.T[2:5])
    np.testing.assert_array_equal(reader.read("bf16", 1, 3), expected["bf16"][1:3])


@pytest.mark.parametrize("shards", [1, 3])
def test_it_loads_as_safetensors_do(shards, tmp_path):
    (tmp_path / "bin").mkdir()
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tiny.weights("qwen3").items()}
    if shards == 1:
        torch_files.write(tmp_path / "bin" / "pytorch_model.bin", tensors)
    else:
        torch_files.write_sharded(tmp_path / "bin", tensors, shards)
    tiny.write_config(tiny.CASES["qwen3"], tmp_path / "bin")
    checkpoint = convert.open_checkpoint(tmp_path / "bin")
    assert (checkpoint.format, checkpoint.dtype) == ("torch", "bfloat16")
    safe = convert.open_checkpoint(tiny.write_checkpoint("qwen3", tmp_path / "safe", dtype="bfloat16"))
    assert_same(load_flat(checkpoint), load_flat(safe))


def test_safetensors_come_first(tmp_path):
    folder = tiny.write_checkpoint("llama", tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert convert.open_checkpoint(folder).format == "safetensors"


class Payload:
    """What a malicious pickle holds: a call, made when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(protocol, tmp_path):
    mark = tmp_path / "was-run"
    data = pickle.dumps({"model.norm.weight": Payload(f"touch {mark}")}, protocol=protocol)
    file = torch_files.archive(tmp_path / "pytorch_model.bin", data, {})
    with pytest.raises(ValueError, match=r"is refused: it refers to posix\.system\. .*no code is run"):
        TorchReader(tmp_path)
    assert not mark.exists()
    pickle.loads(zipfile.ZipFile(file).read("archive/data.pkl"))  # it does what it was made for
    assert mark.exists()


ONE = tensor("0", "float32", 6, 0, (2, 3), (3, 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (dictionary({"a": reference("builtins", "eval") + b"(" + text("1") + b"tR"}), r"refers to builtins\.eval"),
        (dictionary({"a": reference("torch", "load")}), r"refers to torch\.load"),
        (dictionary({"a": reference("collections", "OrderedDict") + b")\x81"}), "uses the operation NEWOBJ"),
        (dictionary({"a": b"(ios\nsystem\n"}), "uses the operation INST"),
        (dictionary({"a": b"\x82\x01"}), "uses the operation EXT1"),
        (dictionary({"a": text("x") + b")R"}), "calls a str"),
        (dictionary({"a": ONE + b"}b"}), "a PickledTensor in the place of a dict"),
        (dictionary({"a": tensor("0", "float32", 6, 0, (2, 3), (3, -1))}), "has -1 for a size, a stride or an offset"),
        (dictionary({"a": tensor("0", "float32", 6, -1, (2, 3), (3, 1))}), "has -1 for a size"),
        (dictionary({"a": tensor("0", "float32", 6, 0, (2, 3), (3,))}), "of 2 dimensions and 1 strides"),
        (dictionary({"a": number(3)}), "holds 'a'; only a dictionary of tensors"),
        (dictionary({"a": ONE})[:-1] + text("a") + ONE + b"s.", "holds 'a' twice"),
        (b"\x80\x02}(" + number(1) + ONE + b"u.", "holds 1; only a dictionary of tensors"),
        (b"\x80\x02}))" + b"s.", "has a tuple for a key"),
        (b"\x80\x02].", "it holds no dictionary"),
        (dictionary({"a": ONE})[:-9], "pickle"),
        (b"\x80\x02u.", "its pickle is damaged"),
        (b"\x80\x02h\x07.", "its pickle is damaged"),
        (b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".", None),
        (b"\x80\x02X" + struct.pack("<I", 2**31) + b"abc", "expected 2147483648 bytes"),
    ],
)
def test_other_pickles_are_refused(data, message, tmp_path):
    """The one with a memo of four billion places is harmless, and takes no memory."""
    torch_files.archive(tmp_path / "pytorch_model.bin", data, {"0": np.zeros(6, np.float32)})
    if message is None:
        assert TorchReader(tmp_path).tensors == {}
        return
    with pytest.raises(ValueError, match=message):
        TorchReader(tmp_path)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (tensor("0", "float32", 6, 1, (2, 3), (3, 1)), "a reaches beyond its storage"),
        (tensor("0", "float32", 6, 10 * 2**30, (2, 3), (3, 1)), "a reaches beyond its storage"),
        (tensor("0", "float32", 6, 0, (2, 2**62), (3, 1)), "a reaches beyond its storage"),
        (tensor("0", "float32", 7, 0, (2, 3), (3, 1)), "storage of a has 7 elements, its record 24 bytes"),
        (tensor("1", "float32", 6, 0, (2, 3), (3, 1)), "has no record data/1"),
        (tensor("0", "float32", 6, 0, (2, 3), (0, 1)), "elements of a overlap"),
        (tensor("0", "float32", 6, 0, (3, 3), (1, 1)), "elements of a overlap"),
        (tensor("0", "float32", 6, 0, (2, 3), (2, 1)), "elements of a overlap"),
    ],
)
def test_tensors_must_lie_within_the_file(pickled, message, tmp_path):
    torch_files.archive(tmp_path / "pytorch_model.bin", dictionary({"a": pickled}), {"0": np.zeros(6, np.float32)})
    with pytest.raises(ValueError, match=message):
        TorchReader(tmp_path)


def test_damaged_files_are_refused(tmp_path):
    good, file = tmp_path / "good.bin", tmp_path / "bad.bin"
    torch_files.write(good, {"a": np.zeros((2, 3), np.float32)})
    data = good.read_bytes()
    for length in (*range(4, len(data) - 1, 7), len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match="is cut short or damaged"):
            read_headers(file)
    for legacy in (b"", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"ustar" * 100):
        file.write_bytes(legacy)
        with pytest.raises(ValueError, match=r"not in the zip format that torch\.save writes since PyTorch 1\.6"):
            read_headers(file)
    for place in range(0, len(data), 3):  # whatever is damaged: read, or refused
        file.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            headers = read_headers(file)
        except ValueError:
            continue
        assert all(stored.read(0, stored.shape[0]).shape == stored.shape for stored in headers.values())


def test_archives_of_another_kind_are_refused(tmp_path):
    tensors, file = {"a": np.zeros((2, 3), np.float32)}, tmp_path / "x.bin"
    torch_files.write(file, tensors, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"record archive/data\.pkl is compressed"):
        read_headers(file)
    torch_files.write(file, tensors, extra=[("other/data/0", b"x" * 24)])
    with pytest.raises(ValueError, match="record other/data/0 is not where its directory says"):
        read_headers(file)
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("word/document.xml", "<w/>")
    with pytest.raises(ValueError, match=r"has no record data\.pkl"):
        read_headers(file)
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("archive/data.pkl", dictionary({}))
        out.writestr("archive/byteorder", "big")
    with pytest.raises(ValueError, match="big-endian"):
        read_headers(file)


def test_nested_tuples_do_not_take_forever():
    """Sixty times a pair of itself: hashed or shown it would take years."""
    bomb = b")" + b"q\x00h\x00\x86" * 60
    with pytest.raises(ValueError, match="has a tuple for a key"):
        read_pickle(b"\x80\x02}" + bomb + b"Ns.")
    with pytest.raises(ValueError, match="has a tuple in the place of a str"):
        read_pickle(b"\x80\x04" + bomb + text("x") + b"\x93.")
