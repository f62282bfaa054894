"""Weights as they are stored: in the model's dtype, or projections in 8 or 4 bits, with the axes of each part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters.declared import Parameter, declare
from jaxinfer.parameters.tree import Tree, flatten, unflatten

if TYPE_CHECKING:
    from pallas_kernels.formats import QuantizedArray

type Placing = Callable[[tuple[str | None, ...]], Any]
"""The sharding of an array with these logical axes."""


def is_stored_in(parameter: Parameter, quantization: Quantization | None) -> bool:
    """Whether this weight is quantized: projections are, and the head in 8 bits, which its many outputs can bear."""
    if quantization is None or not parameter.contract:
        return False
    if parameter.batch:
        return quantization.experts
    if "vocab" in parameter.axes:
        return quantization.head and quantization.format in ("int8", "fp8")
    return quantization.layers


def resolve(config: ModelConfig, quantization: Quantization | None) -> Quantization | None:
    """The quantization with its group size. Raises ValueError if groups do not divide the projections' inputs."""
    if quantization is None or quantization.format != "int4":
        return quantization
    from pallas_kernels.formats import GROUP_SIZES

    each = sorted({p.inputs for _, p in flatten(declare(config)) if is_stored_in(p, quantization)})
    fitting = [size for size in sorted(GROUP_SIZES, reverse=True) if all(inputs % size == 0 for inputs in each)]
    size = quantization.group_size
    if not fitting or size not in (None, *fitting):
        inputs = ", ".join(map(str, each))
        raise ValueError(
            f"int4 in groups of {'any size' if size is None else size} does not fit projections of {inputs} inputs; "
            f"group sizes that fit: {', '.join(map(str, fitting)) or 'none; use int8'}"
        )
    return dataclasses.replace(quantization, group_size=fitting[0] if size is None else size)


def abstract(
    config: ModelConfig,
    dtype: Any,
    sharding: Callable[[tuple[str | None, ...]], Any],
    quantization: Quantization | None,
) -> Tree:
    """A jax.ShapeDtypeStruct, or a QuantizedArray of them, for every weight.

    quantization: as `resolve` gives it.
    """
    return unflatten(
        {
            path: abstract_parameter(parameter, dtype, sharding, quantization)
            for path, parameter in flatten(declare(config))
        }
    )


def abstract_parameter(parameter: Parameter, dtype: Any, sharding: Placing, quantization: Quantization | None) -> Any:
    """One leaf of `abstract`."""
    import jax  # late: opening a checkpoint does without

    if not is_stored_in(parameter, quantization):
        return jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=sharding(parameter.axes))
    shapes = _quantized_shapes(parameter, dtype, quantization)
    axes = stored_axes(parameter, shapes)
    parts: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding(axes[name]))
        for name, part in parts_of(shapes).items()
    }
    return dataclasses.replace(shapes, **parts)


@functools.cache
def _quantized_shapes(parameter: Parameter, dtype: Any, quantization: Quantization | None) -> QuantizedArray:
    import jax

    weight = jax.ShapeDtypeStruct(parameter.shape, dtype)
    return jax.eval_shape(lambda weight: quantized(weight, parameter, quantization), weight)


def quantized(weight: Any, parameter: Parameter, quantization: Quantization | None) -> QuantizedArray:
    """A canonical or laid-out array of this parameter in 8 or 4 bits; traces under jit."""
    from pallas_kernels.formats import quantize

    assert quantization is not None
    options: dict[str, Any] = {"group_size": quantization.group_size} if quantization.group_size else {}
    options |= {"contract": parameter.contract, "batch": parameter.batch, "symmetric": quantization.symmetric}
    return quantize(weight, quantization.format, **options)


def stored_axes(parameter: Parameter, weight: QuantizedArray) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of each part of a quantized weight: outputs keep theirs, the inputs take the first of theirs."""
    batch, axes = parameter.batch, parameter.axes
    whole = (*axes[:batch], *axes[batch + parameter.contract :], axes[batch])
    return {name: whole[: part.ndim] for name, part in parts_of(weight).items()}


def is_quantized(weight: Any) -> bool:
    """Whether it is a QuantizedArray, without importing that."""
    return hasattr(weight, "scales")


def parts_of(weight: QuantizedArray) -> dict[str, Any]:
    """The arrays of a quantized weight by name: values, scales, and zeros where it has them."""
    parts = {name: getattr(weight, name) for name in ("values", "scales", "zeros")}
    return {name: part for name, part in parts.items() if part is not None}


def stored_parts(path: str, weight: Any) -> dict[str, Any]:
    """The arrays of a weight by their names in a native checkpoint: one at `path`, or a quantized one's below it."""
    if not is_quantized(weight):
        return {path: weight}
    return {f"{path}.{name}": part for name, part in parts_of(weight).items()}
