"""The experts of a layer by GPTQ, each on the tokens that were routed to it, one expert at a time.

An expert sees a small part of the text. Where it saw few tokens beside its inputs, what they go together with is mostly
chance, so second moments between inputs are trusted by the number of tokens: of white inputs, whose true moments are
zero, an eighth as many tokens as inputs then does no harm, where plain moments make twice the error of rounding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.calibration.gptq import add_moments, gptq
from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.layerwise import restored
from jaxinfer.parameters import Parameter, moe_parameters, quantized
from pallas_kernels.formats import QuantizedArray
from pallas_kernels.fused_mlp.activations import activate

logger = logging.getLogger(__name__)

LEAST_TOKENS = 32
"""An expert with fewer is rounded to nearest."""
CHUNK = 512
"""Tokens whose products are summed at a time, so that one program serves every number of them."""
SHRINK = 0.5
"""Moments between inputs count tokens / (tokens + SHRINK x inputs)."""


def calibrate_experts(
    rows: np.ndarray,
    chosen: np.ndarray,
    weights: dict[str, jax.Array],
    config: ModelConfig,
    quantization: Quantization,
    dtype: Any,
    name: str,
) -> dict[str, QuantizedArray]:
    """`expert_gate_up` and `expert_down` of one layer in int4, their parts numpy arrays.

    rows: [rows, embed] f32, what the experts took of the text; chosen: [rows, experts of each] i32; weights: those of
    the layer's MLP by their names, float32; quantization: with a group size; dtype: as in `gptq`; name: of the layer,
    for the log. The second projection is calibrated on what the first gives once it is quantized.
    """
    parameters = moe_parameters(config)
    first, second = (parameters[part].one for part in ("expert_gate_up", "expert_down"))
    made: list[tuple[QuantizedArray, QuantizedArray]] = []
    few = 0
    for expert in range(config.num_experts):
        x = rows[(chosen == expert).any(-1)]
        few += len(x) < LEAST_TOKENS
        own = {part: array[expert] for part, array in weights.items() if part.startswith("expert_")}
        gate_up = _one(x, own["expert_gate_up"], first, quantization, dtype)
        between = restored(gate_up, first)
        hidden = [np.asarray(_hidden(x, between, own.get("expert_gate_up_bias"), config)) for x in _chunks(x)]
        x = np.concatenate([*hidden, np.zeros((0, second.inputs), np.float32)])[: len(x)]
        made.append((gate_up, _one(x, own["expert_down"], second, quantization, dtype)))
    if few:
        least = f"fewer than {LEAST_TOKENS} tokens of the text"
        logger.warning("%s: %d of %d experts took %s; they are rounded to nearest", name, few, len(made), least)
    each = zip(*made, strict=True)
    return {
        part: jax.tree.map(lambda *arrays: np.stack(arrays), *weights)
        for part, weights in zip(("expert_gate_up", "expert_down"), each, strict=True)
    }


def _one(
    x: np.ndarray, weight: jax.Array, parameter: Parameter, quantization: Quantization, dtype: Any
) -> QuantizedArray:
    """One projection of one expert; its parts are numpy arrays. x: [tokens, inputs] f32, what it takes."""
    weight = weight.astype(dtype)
    if len(x) < LEAST_TOKENS:
        return _on_host(_nearest(parameter, quantization)(weight))
    total = jnp.zeros((parameter.inputs, parameter.inputs), jnp.float32)
    for chunk in _chunks(x):
        total = add_moments(total, chunk)
    moments = _trusted(total / len(x), len(x) / (len(x) + SHRINK * parameter.inputs))
    made = gptq(weight.reshape(parameter.inputs, -1), moments, quantization)
    outputs = parameter.stored_shape[:-1]
    return _on_host(jax.tree.map(lambda part: part.reshape(*outputs, part.shape[-1]), made))


@functools.cache
def _nearest(parameter: Parameter, quantization: Quantization) -> Callable[[jax.Array], QuantizedArray]:
    return jax.jit(lambda weight: quantized(weight, parameter, quantization))


def _on_host(weight: QuantizedArray) -> QuantizedArray:
    return jax.tree.map(np.asarray, weight)


def _chunks(x: np.ndarray) -> Iterator[np.ndarray]:
    """[CHUNK, inputs] each, the last filled up with zeros."""
    for start in range(0, len(x), CHUNK):
        chunk = x[start : start + CHUNK]
        yield np.pad(chunk, ((0, CHUNK - len(chunk)), (0, 0)))


@jax.jit
def _trusted(moments: jax.Array, share: jax.Array) -> jax.Array:
    """Moments between different inputs times `share`."""
    return share * moments + (1.0 - share) * jnp.diag(jnp.diagonal(moments))


@functools.partial(jax.jit, static_argnums=3)
def _hidden(x: jax.Array, gate_up: jax.Array, bias: jax.Array | None, config: ModelConfig) -> jax.Array:
    """[tokens, mlp] f32: what the second projection of an expert takes. gate_up: [embed, 2, mlp]; bias: [2, mlp]."""
    both = jnp.einsum("te,epm->tpm", x, gate_up, precision=jax.lax.Precision.HIGHEST)
    both = both if bias is None else both + bias
    return activate(config.activation, both[:, 0], both[:, 1])
