"""Loading holds the model once, converting never: the peak of a process above what its imports took."""

import json
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np

from tests import tiny

# 400 MB in float32. Much of it is small layers, as in a real model; the embedding alone would not show a second copy.
CONFIG = {
    **tiny.CASES["llama"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 7,
    "vocab_size": 16000,
    "tie_word_embeddings": True,
}
MODEL_BYTES = 4 * (16000 * 1024 + 7 * (1024 * 1024 * 10 // 4 + 3 * 1024 * 2816))
SLACK = 250e6  # half of what is allowed, and less than the model, so that two copies cannot pass

MEASURE = """
import re, sys, numpy as np, jax, convert
from jaxinfer.parameters import declare, flatten, unflatten
from meshes import build_mesh, sharding
job, folder, native = sys.argv[1:]
mesh, save = build_mesh(), convert.save_native  # the latter imports Orbax
def status(key):
    return int(re.search(key + r':\\s+(\\d+)', open('/proc/self/status').read()).group(1)) * 1024
def load(path):
    checkpoint = convert.open_checkpoint(path)
    leaves = {p: jax.ShapeDtypeStruct(d.shape, np.dtype('float32'), sharding=sharding(mesh, d.axes))
              for p, d in flatten(declare(checkpoint.config))}
    return convert.load(checkpoint, unflatten(leaves), checkpoint.config, progress=False)
jobs = {'load': lambda: load(folder), 'restore': lambda: load(native),
        'save': lambda: save(convert.open_checkpoint(folder), native, dtype='float32', progress=False),
        'keep': lambda: save(convert.open_checkpoint(folder), native, progress=False)}
before, kept = status('VmRSS'), jobs[job]()
print(status('VmHWM') - before)
"""


def test_peak_memory_is_one_model(tmp_path):
    tensors = {}
    shapes = {"model.embed_tokens": (16000, 1024), "model.norm": (1024,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (1024,),
            "post_attention_layernorm": (1024,),
            "self_attn.q_proj": (1024, 1024),
            "self_attn.k_proj": (256, 1024),
            "self_attn.v_proj": (256, 1024),
            "self_attn.o_proj": (1024, 1024),
            "mlp.gate_proj": (2816, 1024),
            "mlp.up_proj": (2816, 1024),
            "mlp.down_proj": (1024, 2816),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = np.ones(shape, ml_dtypes.bfloat16)
    folder = tmp_path / "hf"
    tiny.write_config(CONFIG, folder)
    tiny.write_safetensors(tensors, folder)
    del tensors
    assert MODEL_BYTES < peak("load", folder, tmp_path / "native") < MODEL_BYTES + SLACK
    assert peak("save", folder, tmp_path / "native") < 0.8 * MODEL_BYTES
    assert MODEL_BYTES < peak("restore", folder, tmp_path / "native") < MODEL_BYTES + SLACK


def peak(job, folder, native):
    """Bytes above the process's start."""
    command = [sys.executable, "-c", MEASURE, job, str(folder), str(native)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


LARGE = {**CONFIG, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "vocab_size": 32000}
LARGEST = 2 * 32000 * 2048


def test_converting_takes_memory_for_a_weight_not_for_the_model(tmp_path):
    """1.2 GB in four files of zeros, which take no room on the disk."""
    hidden, mlp = LARGE["hidden_size"], LARGE["intermediate_size"]
    shapes = {"model.embed_tokens": (LARGE["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(LARGE["num_hidden_layers"]):
        kinds = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        kinds |= {f"self_attn.{name}_proj": (hidden if name in "qo" else hidden // 4, hidden) for name in "qkvo"}
        kinds |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in kinds.items()}
    tiny.write_config({**LARGE, "torch_dtype": "bfloat16"}, tmp_path / "hf")
    total = write_zeros({f"{name}.weight": shape for name, shape in shapes.items()}, tmp_path / "hf", shards=4)
    assert total > 1.15e9
    assert peak("keep", tmp_path / "hf", tmp_path / "native") < 250e6 + LARGEST
    assert total < sum(file.stat().st_size for file in (tmp_path / "native").rglob("*") if file.is_file())


def write_zeros(shapes, folder, shards):
    """Sparse safetensors files of bfloat16, and their index; returns the bytes of the tensors."""
    names, weight_map, total = list(shapes), {}, 0
    for shard in range(shards):
        file, header, end = folder / f"model-{shard + 1}.safetensors", {}, 0
        for name in names[shard::shards]:
            begin, end = end, end + 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
            weight_map[name] = file.name
        encoded = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(encoded)) + encoded)
            out.truncate(out.tell() + end)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total
