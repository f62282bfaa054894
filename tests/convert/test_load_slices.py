"""A process reads the slices of its own shards: what is read, and that it is all that the shards hold."""

import json
import math
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts

import convert
from convert import placement
from convert.families.table import Source
from convert.joined import Reordered
from convert.slices import needed, parts
from convert.tensors import Stored
from jaxinfer.config import Quantization
from jaxinfer.parameters import Parameter, declare, flatten, stored_parts
from tests import tiny
from tests.convert.meshed import abstract_tree, load_flat

ROOT = Path(__file__).parent.parent.parent
CASES = [
    *("llama", "llama_biases", "llama_one_kv_head", "qwen3", "phi3", "gpt2", "bloom", "gptj", "mixtral", "gpt_oss"),
    "minimax",
]
"""Sources of rows and of columns, fused ones, ones in another order, and experts, alone and stacked."""


class Counted:
    """A reader that counts the elements it reads; with columns, as those of safetensors."""

    def __init__(self, reader):
        self._reader, self.tensors, self.nbytes = reader, reader.tensors, 0

    def read(self, name, start, stop):
        return self._count(self._reader.read(name, start, stop))

    def read_columns(self, name, start, stop, first, last):
        return self._count(self._reader.read_columns(name, start, stop, first, last))

    def _count(self, rows):
        self.nbytes += rows.nbytes
        return rows


def counted(name, folder):
    checkpoint = convert.open_checkpoint(tiny.write_checkpoint(name, folder))
    object.__setattr__(checkpoint, "reader", Counted(checkpoint.reader))
    return checkpoint


def reads(monkeypatch):
    """Bytes of the reads from files."""
    sizes, read, read_columns = [], Stored.read, Stored.read_columns

    def note(rows):
        sizes.append(rows.nbytes)
        return rows

    monkeypatch.setattr(Stored, "read", lambda *args: note(read(*args)))
    monkeypatch.setattr(Stored, "read_columns", lambda *args: note(read_columns(*args)))
    return sizes


def names(wanted):
    return [next(case for case in tiny.ALL_CASES if case.startswith(name)) for name in wanted]


@pytest.mark.parametrize("name", names(CASES))
@pytest.mark.parametrize("device", [0, 3])
def test_one_process_of_four_reads_its_share(name, device, tmp_path):
    checkpoint = counted(name, tmp_path)
    abstract, physical = abstract_tree(checkpoint.config, 4)
    whole, declared = load_flat(checkpoint, 4), dict(flatten(declare(checkpoint.config)))
    share, checkpoint.reader.nbytes = 0, 0
    for path, leaf in flatten(abstract):
        one = leaf.sharding.mesh.devices.flat[device]
        wanted = needed(path, declared[path], checkpoint.config, physical, leaf, [one])
        array = checkpoint.read(path, leaf.dtype, wanted)
        array = convert.loading.to_physical(path, array, checkpoint.config, physical)
        shard = array[leaf.sharding.devices_indices_map(leaf.shape)[one]]
        np.testing.assert_array_equal(shard, whole[path].addressable_shards[device].data, err_msg=path)
        share += shard.nbytes
    assert 0.9 * share < checkpoint.reader.nbytes <= 1.05 * share


@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_one_process_of_one_reads_every_tensor_once(tensor, tmp_path, monkeypatch):
    checkpoint = convert.open_checkpoint(tiny.write_checkpoint("llama", tmp_path))
    sizes = reads(monkeypatch)
    load_flat(checkpoint, tensor)
    assert sum(sizes) == sum(info.nbytes for info in checkpoint.tensors.values())


def test_rows_in_another_order_are_found_there():
    view = np.zeros((8, 5), bool)
    view[[1, 4, 5]] = True
    [part] = parts(
        Source(("x",), lambda out, config: (Reordered(out, 1, (0, 2, 1, 3)),)),
        view,
        Parameter((8, 5), (None, None)),
        None,
    )
    assert np.flatnonzero(part.rows).tolist() == [2, 4, 6]
    assert part.columns.all()


def test_all_processes_together_read_what_lies_on_one_of_them_once(tmp_path):
    checkpoint = counted("llama", tmp_path)
    abstract, physical = abstract_tree(checkpoint.config, 2)
    declared = dict(flatten(declare(checkpoint.config)))
    for path in ("layers.0.attention.qkv", "layers.1.mlp.gate_up", "layers.1.mlp.down", "embed.weight"):
        leaf, checkpoint.reader.nbytes = dict(flatten(abstract))[path], 0
        for device in jax.devices()[:2]:
            wanted = needed(path, declared[path], checkpoint.config, physical, leaf, [device])
            checkpoint.read(path, leaf.dtype, wanted)
        assert checkpoint.reader.nbytes == sum(checkpoint.tensors[n].nbytes for n in checkpoint.sources[path].names)


def bytes_read():
    """By tensorstore, in this process so far."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", names(["llama", "mixtral"]))
def test_one_process_of_four_reads_its_share_of_a_native_checkpoint(name, quantization, tmp_path, monkeypatch):
    """2 kv heads, and 251 or 99 ids, which 4 does not divide: other dimensions are shared. Files are read whole."""
    monkeypatch.setattr("convert.native._SMALLEST_BYTES", 0)
    stored = quantization and Quantization(quantization)
    source = convert.open_checkpoint(tiny.write_checkpoint(name, tmp_path / "hf"))
    native = convert.save_native(source, tmp_path / "native", quantization=stored, progress=False)
    abstract, _ = abstract_tree(source.config, 4, quantization=stored)
    canonical, _ = abstract_tree(source.config, 4, quantization=stored, physical=source.config)
    device, share, before = jax.devices()[3], 0, bytes_read()
    for path, leaf in flatten(abstract):
        for part in jax.tree.leaves(leaf):
            share += math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize
        for part_name, part in stored_parts(path, placement.fitted(dict(flatten(canonical))[path])).items():
            place = {"driver": "file", "path": f"{native}/weights/{part_name}/"}
            array = ts.open({"driver": "zarr", "kvstore": place}).result()
            before += (native / "weights" / part_name / ".zarray").stat().st_size
            array[part.sharding.devices_indices_map(part.shape)[device]].read().result()
    assert 0.8 * share < bytes_read() - before <= 1.05 * share


def test_two_processes_load_what_one_does_and_read_their_own(tmp_path, monkeypatch):
    """On a mesh of four devices, which divide neither the kv heads nor the vocabulary."""
    monkeypatch.setattr("convert.native._SMALLEST_BYTES", 0)
    source = convert.open_checkpoint(tiny.write_checkpoint("llama", tmp_path / "hf"))
    convert.save_native(source, tmp_path / "native", progress=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.convert.two_processes"]
    processes = [
        subprocess.Popen([*command, rank, port, str(tmp_path)], env=environment, cwd=ROOT, stderr=subprocess.PIPE)
        for rank in "01"
    ]
    whole = load_flat(source, 4)
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-2000:]
            results = json.loads((tmp_path / f"{rank}.json").read_text())
            assert len(results) == 2
            for result in results:
                assert 0.9 * result["held"] < result["read"] <= 1.05 * result["held"]
                assert result["sums"] == [
                    zlib.crc32(np.asarray(shard.data).tobytes())
                    for weight in whole.values()
                    for shard in weight.addressable_shards[2 * rank : 2 * rank + 2]
                ]
    finally:
        for process in processes:
            process.kill()
