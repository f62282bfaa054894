"""Checks the arguments of a norm and the projection behind it and picks the implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import choice
from pallas_kernels.formats import QuantizedArray
from pallas_kernels.fused_mlp import api as mlp
from pallas_kernels.fused_mlp.activations import Activation, activate, erf
from pallas_kernels.fused_mlp.config import stream_config
from pallas_kernels.fused_mlp.stream import normed_stream
from pallas_kernels.quant_matmul import api as quant
from pallas_kernels.quant_matmul import config, kernel
from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.rms_norm.api import obstacle as norm_obstacle
from pallas_kernels.rms_norm.fold import MOST_ROWS, Norm
from pallas_kernels.target import CPU, Target

type Weight = jax.Array | QuantizedArray
type Made = dict[str, jax.Array]
type Way = tuple[str | None, str | None, Callable[[], Made]]
"""Why the kernel cannot run, why it would be slower, and the kernel."""
ROWS = 8
"""Of x in shared memory: what the matrix unit takes at least."""


def norm_projection(
    x: jax.Array,
    norm: Norm,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """x + norm.delta, or x, and `rms_norm` of it times the weight, plus bias.

    x: [M, K]; weight: [K, *outputs] or a QuantizedArray of it; bias: [*outputs]. Returns [M, K] and [M, *outputs]. What
    is multiplied has been rounded to x's dtype, as `rms_norm` rounds. Raises ValueError if shapes or dtypes disagree.
    """
    options: dict[str, Any] = {"target": target, "implementation": implementation, "interpret": interpret}
    inputs, outputs = _sizes(weight)
    _check(x, norm, inputs)
    if bias is not None:
        choice.check_shape("bias", bias, outputs)
    product: Callable[[jax.Array], jax.Array]
    if isinstance(weight, QuantizedArray):
        way = _quant_way(x, norm, weight, None, target, interpret)
        product = functools.partial(quant.quant_matmul, weight=weight, **options)
        total, out = _run("norm_projection", x, norm, way, product, options)
        out = out.reshape(-1, *outputs)
        return total, out if bias is None else out + bias
    flat, terms = weight.reshape(inputs, -1), None if bias is None else bias.reshape(-1)
    way = _stream_way(x, norm, flat[:, None], None if terms is None else terms[None], None, target, interpret)
    product = functools.partial(mlp.down, weight=flat, bias=terms, **options)
    total, out = _run("norm_projection", x, norm, way, product, options)
    return total, out.reshape(-1, *outputs)


def norm_gate_up(
    x: jax.Array,
    norm: Norm,
    weight: Weight,
    bias: jax.Array | None = None,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """x + norm.delta, or x, and `gate_up` of its norm; see there. Returns [M, K] and [M, mlp]."""
    options: dict[str, Any] = {"target": target, "implementation": implementation, "interpret": interpret}
    _check(x, norm, _sizes(weight)[0])
    gate = functools.partial(mlp.gate_up, weight=weight, bias=bias, activation=activation, gated=gated, **options)
    if not gated:
        way: Way = "it takes a gated MLP only", None, dict
    elif not isinstance(weight, QuantizedArray):
        way = _stream_way(x, norm, weight, bias, activation, target, interpret)
    elif bias is not None:
        way = "of quantized weights it adds no bias before the activation", None, dict
    else:
        way = _quant_way(x, norm, weight, functools.partial(activate, activation, erf=erf), target, interpret)
    return _run("norm_gate_up", x, norm, way, gate, options)


def _sizes(weight: Weight) -> tuple[int, tuple[int, ...]]:
    """Inputs and outputs."""
    return (
        (weight.inputs, weight.outputs) if isinstance(weight, QuantizedArray) else (weight.shape[0], weight.shape[1:])
    )


def _check(x: jax.Array, norm: Norm, inputs: int) -> None:
    choice.check_shape("x", x, (None, inputs))
    choice.check_shape("norm.scale", norm.scale, (inputs,))
    if norm.delta is not None:
        choice.check_shape("norm.delta", norm.delta, x.shape)
        if norm.delta.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and norm.delta {norm.delta.dtype}; a norm takes one dtype")


def _run(
    op: str, x: jax.Array, norm: Norm, way: Way, product: Callable[[jax.Array], jax.Array], options: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """The kernel, or a norm and a product."""
    obstacle, loses, fused = way
    target = options["target"]
    obstacle = target.lacks_hopper() or norm_obstacle(x, target) or obstacle
    if obstacle is None and len(x) > MOST_ROWS:
        obstacle = f"it takes up to {MOST_ROWS} rows, of which every block reads all first, not {len(x)}"
    if not target.untimed:
        loses = "it was not timed yet"
    if choice.resolve(op, options["implementation"], obstacle, loses) == "mosaic":
        made = fused()
        return made.get("total", x), made["out"]
    if norm.delta is None:
        return x, product(rms_norm(x, norm.scale, eps=norm.eps, **options))
    total, inner = add_rms_norm(x, norm.delta, norm.scale, eps=norm.eps, **options)
    return total, product(inner)


def _stream_way(
    x: jax.Array,
    norm: Norm,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: Activation | None,
    target: Target,
    interpret: Any,
) -> Way:
    """weight: [K, parts, N]; bias: [parts, N]."""
    inputs, parts, outputs = weight.shape
    obstacle = mlp.obstacle_of(x, weight.dtype, outputs, target)
    if obstacle is not None:
        return obstacle, None, dict
    if parts == 2:
        loses = mlp.gate_up_loses(len(x), parts, outputs, target.cores)
    else:
        loses = mlp.down_loses(len(x), inputs, outputs, target)
    cut = stream_config(len(x), inputs, parts, outputs, target.cores, norm.room(ROWS))
    run = functools.partial(normed_stream, activation=activation, config=cut, interpret=interpret)
    return None, loses, lambda: run(x, norm, weight, bias)


def _quant_way(
    x: jax.Array,
    norm: Norm,
    weight: QuantizedArray,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None,
    target: Target,
    interpret: Any,
) -> Way:
    if weight.round_activations:
        return "it multiplies activations of 16 bits, and this weight has them rounded to 8", None, dict
    if weight.group_size is not None and weight.group_size < 64:
        return f"it takes groups of 64 inputs and more, not {weight.group_size}", None, dict
    flat, parts = quant.flattened(weight), 1 if combine is None else 2
    cut = config.choose(len(x), flat, x.dtype.itemsize, target, parts, room=norm.room(ROWS))
    obstacle = quant.obstacle_of(x, flat, target, cut)
    if obstacle is not None or cut is None:
        return obstacle, None, dict
    run = functools.partial(kernel.normed, interpret=interpret)
    return None, config.loses(len(x), flat, cut, target, parts), lambda: run(x, norm, flat, x.dtype, cut, combine)
