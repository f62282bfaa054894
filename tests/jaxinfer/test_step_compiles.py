"""The engine's steps, compiled for a GPU that is not there: kernels in every layer, the cache updated in place."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import ModelConfig, Quantization, RopeConfig
from jaxinfer.engine import cache
from jaxinfer.engine.batch import BatchShape
from jaxinfer.engine.step import State, StepRunner, target_of
from jaxinfer.weights import abstract_weights
from meshes import AXES, sharding
from scripts import aot

LAYERS, PAGES, SEQUENCES = 2, 512, 16
MODEL = ModelConfig(
    family="llama", vocab_size=2048, hidden_size=4096, num_layers=LAYERS, num_heads=32, num_kv_heads=8, head_dim=128,
    mlp_size=14336, max_position=8192, rope=RopeConfig(),
)  # fmt: skip
BF16 = jnp.dtype(jnp.bfloat16)
DECODE = BatchShape(SEQUENCES, SEQUENCES, width=128, groups=1, decode=True, sampling="greedy")
FEW = BatchShape(4, 4, width=128, groups=1, decode=True, sampling="greedy")
RAGGED = BatchShape(256, SEQUENCES, width=128, groups=1, decode=False, sampling="greedy")


def compile_step(shape, cache_dtype, quantization, untimed=False):
    mesh = aot.gpu_mesh("h200", axes=AXES)
    target = dataclasses.replace(target_of(mesh), untimed=untimed)
    runner = StepRunner(MODEL, abstract_weights(MODEL, BF16, mesh, quantization), mesh, target)
    pages = cache.abstract_cache(MODEL, (PAGES,), 64, cache.stored_dtype(cache_dtype, BF16), mesh)
    state = State(pages, jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32, sharding=sharding(mesh)))
    lowered = runner.lower(shape, state)
    with aot.mosaic_dump() as folder:
        compiled = lowered.compile()
        kernels = [aot.parse_ptxas(path.read_text()) for path in folder.glob("*.ptxas")]
    return compiled, kernels, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))


@pytest.mark.parametrize(
    ("shape", "cache_dtype", "quantization", "untimed", "count"),
    [
        # norm, qkv, append, attention, out, norm, gate and up, down
        (DECODE, "int8", None, False, 8 * LAYERS),
        # norm, qkv, append, attention, out, norm, gate and up, down; the head
        (RAGGED, "auto", Quantization("int8"), False, 8 * LAYERS + 1),
        # norm and qkv, append, attention, out, norm with gate and up, down
        (FEW, "auto", None, True, 6 * LAYERS),
    ],
    ids=["decode", "ragged", "few"],
)
def test_kernels_in_every_layer_and_the_cache_in_place(shape, cache_dtype, quantization, untimed, count):
    compiled, kernels, cache_bytes = compile_step(shape, cache_dtype, quantization, untimed)
    assert all(kernel.spilled_bytes == 0 for kernel in kernels)
    text = compiled.as_text()
    calls = re.findall(r'custom_call_target="mosaic_gpu[^"]*"', text)
    assert len(calls) == count
    # A loop or a branch on the device would make the GPU wait for the host, and split the CUDA graph.
    assert not re.findall(r" (?:while|conditional)\(", text)
    # A kernel that is handed a slice of the packed batch refuses it on the GPU, for it is not aligned.
    assert "dynamic_slice_fusion" not in text
    output, _ = compiled.out_info
    assert output.row_logprobs is None
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 4
