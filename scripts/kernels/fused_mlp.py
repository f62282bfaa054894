"""The MLP's projections beside XLA's matmul and activation, at Llama-3-8B's sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.formats import FORMATS, Format
from pallas_kernels.fused_mlp import down, gate_up, reference
from pallas_kernels.target import H200
from scripts.kernels import quant_matmul
from scripts.kernels.common import Case, Program

EMBED, MLP = 4096, 14336


def normal(key: jax.Array, *shape: int, size: float = 1.0) -> jax.Array:
    return (size * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)


def gate_up_inputs(key: jax.Array, tokens: int) -> tuple[jax.Array, ...]:
    x_key, weight_key = jax.random.split(key)
    return normal(x_key, tokens, EMBED), normal(weight_key, EMBED, 2, MLP, size=EMBED**-0.5)


def down_inputs(key: jax.Array, tokens: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, 3)
    weight = normal(keys[1], MLP, EMBED, size=MLP**-0.5)
    return normal(keys[0], tokens, MLP), weight, normal(keys[2], tokens, EMBED)


def programs(op: Callable[..., jax.Array]) -> dict[str, Program]:
    return {
        "chosen": Program(functools.partial(op, target=H200), autotuned=True),
        "xla": Program(functools.partial(op, target=H200, implementation="xla"), autotuned=True),
    }


def gate_up_case(tokens: int) -> Case:
    return Case(
        name=f"gate_up bf16 M={tokens}",
        op="fused_mlp",
        inputs=functools.partial(gate_up_inputs, tokens=tokens),
        programs=programs(gate_up),
        reference=reference.gate_up,
        tolerance=8e-3,
        bytes=2 * (2 * EMBED * MLP + tokens * (EMBED + MLP)),
        flops=2 * tokens * EMBED * 2 * MLP,
        max_ratio=("xla", 0.95 if tokens <= 64 else 1.0),
    )


def quantized_gate_up_case(format: Format, tokens: int) -> Case:
    """With the activation; XLA's is its fastest of the same: a matmul that widens, and the activation behind it."""
    inputs = functools.partial(
        quant_matmul.make_inputs, rows=tokens, inputs=EMBED, outputs=(2, MLP), format=format, symmetric=True
    )
    _, weight = jax.eval_shape(inputs, jax.random.key(0))
    return Case(
        name=f"gate_up {format} M={tokens}",
        op="fused_mlp",
        inputs=inputs,
        programs=programs(gate_up),
        reference=reference.gate_up,
        tolerance=8e-3,
        bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)) + 2 * tokens * (EMBED + MLP),
        flops=2 * tokens * EMBED * 2 * MLP,
        max_ratio=("xla", 0.95),
    )


def down_case(tokens: int) -> Case:
    return Case(
        name=f"down bf16 M={tokens}",
        op="fused_mlp",
        inputs=functools.partial(down_inputs, tokens=tokens),
        programs=programs(down),
        reference=reference.down,
        tolerance=8e-3,
        bytes=2 * (MLP * EMBED + tokens * (MLP + 2 * EMBED)),
        flops=2 * tokens * MLP * EMBED,
        max_ratio=("xla", 1.0),
    )


def projection_inputs(key: jax.Array, tokens: int, outputs: int) -> tuple[jax.Array, ...]:
    x_key, weight_key = jax.random.split(key)
    return normal(x_key, tokens, EMBED), normal(weight_key, EMBED, outputs, size=EMBED**-0.5)


def projection_case(tokens: int, outputs: int) -> Case:
    """Attention's, before it (queries, keys and values) and after."""
    return Case(
        name=f"projection bf16 {EMBED}x{outputs} M={tokens}",
        op="fused_mlp",
        inputs=functools.partial(projection_inputs, tokens=tokens, outputs=outputs),
        programs=programs(down),
        reference=reference.down,
        tolerance=8e-3,
        bytes=2 * (EMBED * outputs + tokens * (EMBED + outputs)),
        flops=2 * tokens * EMBED * outputs,
        max_ratio=("xla", 0.9 if tokens > 64 else 1.0),
    )


def cases() -> list[Case]:
    gate_ups = [gate_up_case(tokens) for tokens in (1, 16, 64, 512, 2048, 8192)]
    small = [quantized_gate_up_case(format, tokens) for format in FORMATS for tokens in (1, 16, 64)]
    gate_ups += [*small, *(quantized_gate_up_case("int8", tokens) for tokens in (128, 256, 2048))]
    projections = [
        projection_case(tokens, outputs) for outputs in (EMBED + 2048, EMBED) for tokens in (1, 64, 128, 256)
    ]
    return gate_ups + [down_case(tokens) for tokens in (16, 32, 64, 128, 256)] + projections
