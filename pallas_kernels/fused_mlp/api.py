"""Checks the arguments of the MLP's projections and picks the implementation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.formats import QuantizedArray, QuantizedRows
from pallas_kernels.fused_mlp import xla
from pallas_kernels.fused_mlp.activations import NAMES, Activation, activate, erf
from pallas_kernels.fused_mlp.config import (
    BUSY,
    PAIRED_TOKENS,
    PAIRS_BUSY,
    SPLIT_INPUTS,
    SPLIT_TOKENS,
    STREAMED_TOKENS,
    TiledConfig,
    pair_config,
    pairs_busy,
    stream_config,
    streams,
    tiled_busy,
)
from pallas_kernels.fused_mlp.pairs import paired
from pallas_kernels.fused_mlp.stream import stream
from pallas_kernels.fused_mlp.tiled import tiled
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.target import CPU, Target

type Weight = jax.Array | QuantizedArray


def gate_up(
    x: jax.Array | QuantizedRows,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """activation(x · gate) · (x · up), biases added to the products; not gated: activation(x · weight).

    x: [M, K], or QuantizedRows of a quantized weight's format; weight: [K, 2, mlp], gate first, or [K, mlp] if not
    gated, or a QuantizedArray of it; bias: [2, mlp] or [mlp]. Returns [M, mlp] in x's dtype; the activation is computed
    in float32.
    Raises ValueError for an activation that does not exist, clamped_silu without a gate, shapes that disagree.
    """
    if activation not in NAMES:
        raise ValueError(f"there is no activation {activation!r}; there are: {', '.join(NAMES)}")
    if activation == "clamped_silu" and not gated:
        raise ValueError("clamped_silu is defined for a gated MLP only; pass gated=True, or take silu")
    outputs = _check("weight", x, weight, (2, None) if gated else (None,))
    if bias is not None:
        choice.check_shape("bias", bias, outputs)
    options: dict[str, Any] = {"target": target, "implementation": implementation, "interpret": interpret}
    if isinstance(weight, QuantizedArray):
        if bias is not None or not gated:
            return xla.activated(quant_matmul(x, weight, **options), bias, activation, gated)
        erf_there = jax.lax.erf if target.lacks_hopper() else erf
        return quant_matmul(x, weight, combine=functools.partial(activate, activation, erf=erf_there), **options)
    if isinstance(x, QuantizedRows):
        raise ValueError(f"x has 8 bits and the weight is {weight.dtype}; rows in 8 bits take a weight in the same")
    parts = 2 if gated else 1
    obstacle = obstacle_of(x, weight.dtype, outputs[-1], target)
    if obstacle is None and not gated and x.shape[0] > STREAMED_TOKENS:
        obstacle = f"without a gate, over {STREAMED_TOKENS} tokens, XLA's matmul is as fast"
    loses = None if obstacle else gate_up_loses(x.shape[0], parts, outputs[-1], target.cores)
    if choice.resolve("gate_up", implementation, obstacle, loses) == "xla":
        return xla.gate_up(x, weight, bias, activation, gated)
    tokens, mlp, x = x.shape[0], outputs[-1], _whole_tiles(x)
    weight = weight.reshape(weight.shape[0], parts, mlp)
    bias = None if bias is None else bias.reshape(parts, mlp)
    if tokens <= STREAMED_TOKENS:
        config = stream_config(x.shape[0], x.shape[1], parts, mlp, target.cores)
        out = stream(x, weight, bias, None, activation=activation, config=config, interpret=interpret)
    else:
        tiles = TiledConfig()
        out = tiled(x, weight, bias, activation=activation, cores=target.cores, config=tiles, interpret=interpret)
    return out[:tokens]


def down(
    hidden: jax.Array,
    weight: Weight,
    residual: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """hidden · weight + bias + residual.

    hidden: [M, mlp]; weight: [mlp, K] or a QuantizedArray of it; residual: [M, K]; bias: [K]. Returns [M, K] in
    hidden's dtype. Raises ValueError if shapes disagree.
    """
    outputs = _check("weight", hidden, weight, (None,))
    if residual is not None:
        choice.check_shape("residual", residual, (hidden.shape[0], *outputs))
    if bias is not None:
        choice.check_shape("bias", bias, outputs)
    options: dict[str, Any] = {"target": target, "implementation": implementation, "interpret": interpret}
    if isinstance(weight, QuantizedArray):
        return xla.added(quant_matmul(hidden, weight, **options), residual, bias)
    obstacle = obstacle_of(hidden, weight.dtype, outputs[-1], target)
    if obstacle is None and hidden.shape[0] > PAIRED_TOKENS:
        obstacle = f"over {PAIRED_TOKENS} tokens XLA's matmul, which adds the residual itself, is as fast"
    loses = None if obstacle else down_loses(hidden.shape[0], hidden.shape[1], outputs[-1], target)
    if choice.resolve("down", implementation, obstacle, loses) == "xla":
        return xla.down(hidden, weight, residual, bias)
    tokens, hidden = hidden.shape[0], _whole_tiles(hidden)
    residual = None if residual is None else _whole_tiles(residual)
    if not streams(tokens, outputs[-1], target.cores):
        pairs = pair_config(hidden.shape[0], outputs[-1], target.cores)
        return paired(hidden, weight, bias, residual, config=pairs, interpret=interpret)[:tokens]
    config = stream_config(hidden.shape[0], hidden.shape[1], 1, outputs[-1], target.cores)
    bias = None if bias is None else bias[None]
    out = stream(hidden, weight[:, None], bias, residual, activation=None, config=config, interpret=interpret)
    return out[:tokens]


def fused_mlp(
    x: jax.Array,
    gate_up_weight: Weight,
    down_weight: Weight,
    residual: jax.Array | None = None,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """`gate_up`, then `down`, each with its own choice. x, residual: [M, K]. Returns [M, K]."""
    options: dict[str, Any] = {"target": target, "implementation": implementation, "interpret": interpret}
    hidden = gate_up(x, gate_up_weight, gate_up_bias, activation=activation, gated=gated, **options)
    return down(hidden, down_weight, residual, down_bias, **options)


def _check(name: str, x: jax.Array | QuantizedRows, weight: Weight, outputs: tuple[int | None, ...]) -> tuple[int, ...]:
    """The weight's outputs; ValueError unless they are like `outputs` and the inputs are x's."""
    choice.check_shape("x", x, (None, None))
    if isinstance(weight, QuantizedArray):
        shape: tuple[int, ...] = (weight.inputs, *weight.outputs)
    else:
        shape = weight.shape
    wanted = (x.shape[1], *outputs)
    if len(shape) != len(wanted) or any(want not in (None, got) for got, want in zip(shape, wanted)):
        letters = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ValueError(f"{name} is {shape}, inputs first; for x {x.shape} it must be [{letters}]")
    return shape[1:]


def _whole_tiles(x: jax.Array) -> jax.Array:
    """x with rows up to a multiple of 8, in which the copy engine counts; fewer than 8 it pads by itself."""
    missing = -x.shape[0] % 8 if x.shape[0] > 8 else 0
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def gate_up_loses(tokens: int, parts: int, mlp: int, cores: int) -> str | None:
    """Why XLA may be faster where the kernel of gate_up could run: it was, or nobody measured. None: the kernel is."""
    if parts == 1:
        return "without a gate it is not known to be faster"
    if tokens <= STREAMED_TOKENS:
        return _one_wave(mlp / 128, cores)
    share = tiled_busy(tokens, mlp, cores)
    return f"its tiles keep only {share:.0%} of the multiprocessors busy" if share < BUSY else None


def down_loses(tokens: int, inputs: int, outputs: int, target: Target) -> str | None:
    """The same of down."""
    cores = target.cores
    if tokens > SPLIT_TOKENS and inputs >= SPLIT_INPUTS:
        return f"from {SPLIT_INPUTS} inputs, over {SPLIT_TOKENS} tokens, XLA's matmul is as fast"
    if inputs < SPLIT_INPUTS:
        tiles = outputs // 64
        if not streams(tokens, outputs, cores) and pairs_busy(tokens, outputs, cores) < PAIRS_BUSY:
            return f"its blocks keep less than {PAIRS_BUSY:.0%} of {cores} cores busy"
        known = inputs >= 4096 and 64 <= tiles <= cores
        return (
            None
            if known
            else f"it is known to be faster from 4096 inputs with 64 to {cores} tiles, not {inputs} and {tiles}"
        )
    if tokens < 16 and not target.untimed:  # XLA may add up its parts in a second kernel; within a step: not timed
        return "below 16 tokens XLA's matmul is as fast"
    return _one_wave(2 * outputs / 64, cores)


def _one_wave(blocks: float, cores: int) -> str | None:
    """None if every multiprocessor, about, has one block."""
    if BUSY * cores <= blocks <= cores:
        return None
    return f"it is known to be faster where its blocks occupy {BUSY:.0%} to 100% of {cores} cores once, not {blocks:g}"


def obstacle_of(x: jax.Array, weight_dtype: Any, outputs: int, target: Target) -> str | None:
    (tokens, inputs), dtype = x.shape, jnp.dtype(x.dtype)
    if lacking := target.lacks_hopper():
        return lacking
    if dtype not in (jnp.float16, jnp.bfloat16) or dtype != jnp.dtype(weight_dtype):
        return f"it takes float16 or bfloat16, the same for all, not {dtype} x {jnp.dtype(weight_dtype)}"
    if inputs % 64 or outputs % 64:
        return f"it takes inputs and outputs in multiples of 64, not {inputs} and {outputs}"
    return None if tokens else "there are no tokens"
