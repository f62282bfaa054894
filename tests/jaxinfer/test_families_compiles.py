"""What sets families apart from Llama, compiled for a GPU that is not there: the kernels take it, without a loop."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig, QueryScaling, RopeConfig
from jaxinfer.engine import cache
from jaxinfer.engine.batch import BatchShape
from jaxinfer.engine.step import State, StepRunner
from jaxinfer.weights import abstract_weights
from meshes import AXES, sharding
from scripts import aot

LAYERS, SEQUENCES = 2, 16
CHIMERA = ModelConfig(
    family="chimera",
    vocab_size=2048,
    hidden_size=1024,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    mlp_size=2048,
    max_position=4096,
    rope=RopeConfig(dims=32),
    # of Gemma 3
    norm_offset=1.0,
    norm_placement="sandwich",
    qk_norm=True,
    windows=(512, None),
    window_rope=RopeConfig(theta=500.0),
    attention_soft_cap=50.0,
    logit_soft_cap=30.0,
    embedding_scale=32.0,
    # of gpt-oss
    sinks=True,
    num_experts=8,
    experts_per_token=2,
    expert_size=1024,
    expert_bias=True,
    activation="clamped_silu",
    qkv_bias=True,
    out_bias=True,
    # of Llama 4
    chunks=(None, 256),
    query_scaling=QueryScaling(0.1, 64),
    router_scales_input=True,
)


def test_kernels_in_every_layer():
    """Four norms, append, attention, and the experts' two projections."""
    model, per_layer = CHIMERA, 8
    mesh, bfloat16 = aot.gpu_mesh("h200", axes=AXES), jnp.dtype(jnp.bfloat16)
    groups = len(model.cache_groups)
    runner = StepRunner(model, abstract_weights(model, bfloat16, mesh, None), mesh)
    pages = cache.abstract_cache(model, (64,) * groups, 64, bfloat16, mesh)
    state = State(pages, jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32, sharding=sharding(mesh)))
    shape = BatchShape(SEQUENCES, SEQUENCES, width=8, groups=groups, decode=True, sampling="greedy")
    text = runner.lower(shape, state).compile().as_text()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == per_layer * LAYERS
    assert not re.findall(r" (?:while|conditional)\(", text)
