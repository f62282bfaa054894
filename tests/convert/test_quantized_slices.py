"""Of a checkpoint that others quantized, or of GGUF, or with an adapter, a process reads the slices of its shards."""

import math

import gguf
import jax
import numpy as np
import pytest

import convert
from convert import loading
from convert.tensors import Stored
from jaxinfer.parameters import flatten
from tests import tiny, wide_experts
from tests.convert import test_lora, test_quantized
from tests.convert.gguf_files import gguf_tensors, write_gguf
from tests.convert.meshed import abstract_tree, load_flat

WIDE = {
    **tiny.CASES["llama"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 256,
}
"""Four devices cut no group of inputs, and have a kv head each."""


AS_FLOATS = [
    *("gptq2", "gptq3_v2", "gptq4_symmetric", "gptq4_act_order", "awq", "int4_zeros_act_order", "int8_packed"),
    *("int8_groups_zeros", "fp8_tensor", "deepseek", "nf4_nested", "bnb8"),
]
KEPT = ["gptq4", "awq_without_zeros", "int4_zeros", "int8", "fp8_tensor"]


class OneOfFour:
    """Loads what one process of four would, and counts the bytes that it reads from files."""

    def __init__(self, monkeypatch):
        self.bytes, read, columns, needed = 0, Stored.read, Stored.read_columns, loading.needed
        monkeypatch.setattr(Stored, "read", lambda *args: self._count(read(*args)))
        monkeypatch.setattr(Stored, "read_columns", lambda *args: self._count(columns(*args)))
        monkeypatch.setattr(loading, "needed", lambda *args: needed(*args[:-1], jax.devices()[3:4]))

    def _count(self, rows):
        self.bytes += rows.nbytes
        return rows


def shares(checkpoint, quantization):
    """Bytes, of those in which each weight is stored, that belong to one device of four."""
    total = 0
    for path, leaf in flatten(abstract_tree(checkpoint.config, 4, quantization=quantization)[0]):
        largest = max(jax.tree.leaves(leaf), key=lambda part: part.size)
        share = math.prod(largest.sharding.shard_shape(largest.shape)) / largest.size
        total += share * sum(checkpoint.tensors[name].nbytes for name in checkpoint.sources[path].names)
    return total


def check(checkpoint, quantization, monkeypatch, limit=1.05):
    whole = load_flat(checkpoint, 4, quantization=quantization)
    with monkeypatch.context() as patched:
        one = OneOfFour(patched)
        loaded = load_flat(checkpoint, 4, quantization=quantization)
    for path, weight in whole.items():
        for part, mine in zip(jax.tree.leaves(weight), jax.tree.leaves(loaded[path]), strict=True):
            np.testing.assert_array_equal(
                mine.addressable_shards[3].data, part.addressable_shards[3].data, err_msg=path
            )
    assert 0.9 * (share := shares(checkpoint, quantization)) < one.bytes <= limit * share


@pytest.mark.parametrize(
    ("name", "kept"),
    [*((name, False) for name in AS_FLOATS), *((name, True) for name in KEPT)],
)
def test_one_process_of_four_reads_its_share(name, kept, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.CASES, "llama", WIDE)
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 100_000)
    test_quantized.write(tmp_path, *test_quantized.CASES[name])
    checkpoint = convert.open_checkpoint(tmp_path)
    # In groups of 32 scales are an eighth. Where inputs are mixed, those of any device are in all groups.
    limit = 1.2 if "act_order" in name else 1.05
    check(checkpoint, checkpoint.quantization if kept else None, monkeypatch, limit)


@pytest.mark.parametrize("kept", [False, True])
def test_experts_in_mxfp4(kept, tmp_path, monkeypatch):
    sizes = {"num_hidden_layers": 1, "intermediate_size": 128, "num_key_value_heads": 4}
    folder, _ = wide_experts.write_mxfp4(tmp_path, layer_types=["full_attention"], **sizes)
    checkpoint = convert.open_checkpoint(folder)
    check(checkpoint, checkpoint.quantization if kept else None, monkeypatch)


def test_blocks_of_gguf(tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.CASES, "llama", WIDE)
    tensors, kind = gguf_tensors("llama"), gguf.GGMLQuantizationType.Q8_0
    low = {name: (kind, gguf.quantize(array, kind)) for name, array in tensors.items() if array.ndim == 2}
    check(convert.open_checkpoint(write_gguf(tmp_path / "x.gguf", WIDE, tensors, quantized=low)), None, monkeypatch)


def test_the_base_of_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.CASES, "llama", WIDE)
    module = "model.layers.0.mlp.down_proj"
    folder = test_lora.adapter(tmp_path / "lora", test_lora.pair(module, *test_lora.factors(4, 256, 512, 0)))
    check(convert.open_checkpoint(folder), None, monkeypatch, 1.2)
