"""Memory for a weight, not for a second model: the peak of a process above what its imports took.

At a tenth of the size that `scripts/bench_load.py` measures: 1.2 GB in four files.
"""

import json
import struct
import subprocess
import sys

import numpy as np

from tests import tiny

CONFIG = {
    **tiny.CASES["llama"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LARGEST = 2 * 32000 * 2048
ALLOWED = 400e6  # above the weights that stay: less than half of what is allowed for a model of any size

MEASURE = """
import re, sys, jax, convert
from convert.checkpoint import NUMPY_DTYPES
from jaxinfer.parameters import declare, flatten, unflatten
from meshes import build_mesh, sharding
job, folder, native = sys.argv[1:]
mesh, save = build_mesh(), convert.save_native  # the latter imports Orbax
def status(key):
    return int(re.search(key + r':\\s+(\\d+)', open('/proc/self/status').read()).group(1)) * 1024
def load(path):
    checkpoint = convert.open_checkpoint(path)
    leaves = {p: jax.ShapeDtypeStruct(d.shape, NUMPY_DTYPES[checkpoint.dtype], sharding=sharding(mesh, d.axes))
              for p, d in flatten(declare(checkpoint.config))}
    return convert.load(checkpoint, unflatten(leaves), checkpoint.config, progress=False)
jobs = {'load': lambda: load(folder), 'restore': lambda: load(native),
        'save': lambda: save(convert.open_checkpoint(folder), native, progress=False)}
before, kept = status('VmRSS'), jobs[job]()
print(status('VmHWM') - before)
"""


def test_loading_holds_the_model_once_and_converting_never(tmp_path):
    """The files are zeros, which take no room on the disk; much of them is small layers, as in a real model."""
    folder, native = tmp_path / "hf", tmp_path / "native"
    tiny.write_config(CONFIG, folder)
    total = write_zeros(folder, shards=4)
    assert total > 1.2e9
    assert peak("save", folder, native) < ALLOWED < total / 3
    assert total < sum(file.stat().st_size for file in native.rglob("*") if file.is_file())
    assert total < peak("load", folder, native) < total + ALLOWED
    assert total < peak("restore", folder, native) < total + ALLOWED + LARGEST


def shapes():
    hidden, mlp = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    yield "model.embed_tokens.weight", (CONFIG["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows in {"q": hidden, "k": hidden // 4, "v": hidden // 4, "o": hidden}.items():
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
        for name, shape in {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}.items():
            yield f"{prefix}.mlp.{name}_proj.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (hidden,)


def peak(job, folder, native):
    """Bytes above the process's start."""
    command = [sys.executable, "-c", MEASURE, job, str(folder), str(native)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def write_zeros(folder, shards):
    """Sparse safetensors files of bfloat16, and their index; returns the bytes of the tensors."""
    tensors, weight_map, total = list(shapes()), {}, 0
    for shard in range(shards):
        file, header, end = folder / f"model-{shard + 1}.safetensors", {}, 0
        for name, shape in tensors[shard::shards]:
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[name] = file.name
        encoded = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            out.truncate(out.tell() + end)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total
