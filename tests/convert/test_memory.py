"""Loading holds one copy of the model: the peak of a process of its own above what its imports took."""

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
        'save': lambda: save(convert.open_checkpoint(folder), native, dtype='float32', progress=False)}
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
    for job in ("load", "save", "restore"):
        command = [sys.executable, "-c", MEASURE, job, str(folder), str(tmp_path / "native")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert MODEL_BYTES < int(result.stdout) < MODEL_BYTES + SLACK, job
