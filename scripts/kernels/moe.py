"""Mixture of experts at the sizes of Mixtral 8x7B, Qwen3 30B-A3B and gpt-oss 20B, beside XLA's ragged_dot."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats import FORMATS, Format, QuantizedArray, dequantize, quantize
from pallas_kernels.moe import moe
from pallas_kernels.target import H200
from scripts.kernels.common import Case, Program

BYTES = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 2 / 128, "mxfp4": 0.5 + 1 / 32}
"""Of a weight, scales included."""


class Model(NamedTuple):
    experts: int
    top_k: int
    embed: int
    mlp: int


MODELS = {
    "Mixtral": Model(8, 2, 4096, 14336),
    "Qwen3-30B": Model(128, 8, 2048, 768),
    "gpt-oss-20B": Model(32, 4, 2880, 2880),
}


type Stored = Literal["bf16"] | Format


def make_inputs(key: jax.Array, model: Model, tokens: int, format: Stored) -> tuple[Any, ...]:
    keys = jax.random.split(key, 5)
    x = jax.random.normal(keys[0], (tokens, model.embed), jnp.bfloat16)
    _, experts = jax.lax.top_k(jax.random.uniform(keys[1], (tokens, model.experts)), model.top_k)
    weights = jax.random.uniform(keys[2], experts.shape)
    gate_up = (model.experts, model.embed, 2, model.mlp)
    down = (model.experts, model.mlp, model.embed)
    return x, experts, weights, make_weight(keys[3], gate_up, format), make_weight(keys[4], down, format)


def make_weight(key: jax.Array, shape: tuple[int, ...], format: Stored) -> jax.Array | QuantizedArray:
    def one(key: jax.Array) -> jax.Array | QuantizedArray:
        weight = jax.random.normal(key, shape[1:], jnp.bfloat16) * shape[1] ** -0.5
        return weight if format == "bf16" else quantize(weight, format)

    return jax.lax.map(one, jax.random.split(key, shape[0]))  # an expert at a time: quantizing takes float32


def expert(weight: jax.Array | QuantizedArray, index: jax.Array) -> jax.Array:
    """[inputs, *outputs] f32."""
    one = jax.tree.map(lambda leaf: leaf[index], weight)
    return jnp.moveaxis(dequantize(one, jnp.float32), -1, 0) if isinstance(one, QuantizedArray) else one.astype("f4")


def reference(x: jax.Array, experts: jax.Array, weights: jax.Array, gate_up: Any, down: Any) -> jax.Array:
    """Every expert for every token, most of it times zero."""
    product = functools.partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        both = product(x.astype(jnp.float32), expert(gate_up, i))
        out = product(jax.nn.silu(both[:, 0]) * both[:, 1], expert(down, i))
        return total + jnp.sum(jnp.where(experts == i, weights, 0.0), axis=1)[:, None] * out

    return jax.lax.fori_loop(0, jax.tree.leaves(gate_up)[0].shape[0], add, jnp.zeros(x.shape, jnp.float32))


def ragged_dot(x: jax.Array, experts: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """As one writes it with XLA alone."""
    flat = experts.reshape(-1)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=gate_up.shape[0])
    both = jax.lax.ragged_dot(x[order // experts.shape[1]], gate_up.reshape(*gate_up.shape[:2], -1), sizes)
    gate, up = jnp.split(both, 2, axis=1)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)[jnp.argsort(order)]
    return jnp.sum(out.reshape(*experts.shape, -1) * weights[..., None], axis=1).astype(x.dtype)


def case(name: str, tokens: int, format: Stored = "bf16", **targets: Any) -> Case:
    model = MODELS[name]
    touched = model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)
    programs = {"mosaic": Program(functools.partial(moe, target=H200, implementation="mosaic"))}
    if format == "bf16" and name == "Mixtral":
        programs["ragged_dot"] = Program(ragged_dot, autotuned=True)
    return Case(
        name=f"{name} {format} T={tokens}",
        op="moe",
        inputs=functools.partial(make_inputs, model=model, tokens=tokens, format=format),
        programs=programs,
        reference=reference,
        tolerance=1e-2,
        bytes=int(touched * 3 * model.embed * model.mlp * BYTES[format]) + 4 * tokens * model.embed,
        flops=2 * tokens * model.top_k * 3 * model.embed * model.mlp,
        **targets,
    )


def cases() -> list[Case]:
    return [
        case("Mixtral", 1),
        case("Mixtral", 64, min_share=0.8),
        case("Mixtral", 512),
        case("Mixtral", 4096, min_tflops=600.0),
        *(case("Mixtral", tokens, format) for format in FORMATS for tokens in (1, 64)),
        *(case("Qwen3-30B", tokens) for tokens in (1, 64, 4096)),
        case("Qwen3-30B", 64, "int8"),
        *(case("gpt-oss-20B", tokens) for tokens in (64, 4096)),
        *(case("gpt-oss-20B", tokens, "mxfp4") for tokens in (1, 64)),
    ]
