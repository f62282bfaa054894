"""int4 weights out as GPTQ stores them: the integers, scales and zero points that they are kept in, in its order.

The layout is described in `convert/quantized/gptq.py`. Groups are of neighbours. Version 1 of the format where there
are no zero points, which every reader knows, and version 2 where there are, since 1 cannot say 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from convert.low_bit import canonical, fusible
from convert.safetensors_writer import Outgoing
from convert.transforms import Transform
from jaxinfer.config import ModelConfig, Quantization
from jaxinfer.parameters import Parameter

type Part = Callable[[str], np.ndarray]


def quantization_config(quantization: Quantization) -> dict[str, Any]:
    """Of config.json."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": quantization.group_size,
        "sym": quantization.symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if quantization.symmetric else "gptq_v2",
    }


def outgoing(
    names: list[str],
    parameter: Parameter,
    transform: Transform,
    config: ModelConfig,
    quantization: Quantization,
    read: Callable[[], dict[str, np.ndarray]],
) -> Iterator[Outgoing]:
    """The tensors of one projection that is stored in int4.

    read: gives its values [*outputs, inputs] int8, unpacked, and its scales and zeros [*outputs, groups].
    Raises ValueError for a family that stores inputs first, which GPTQ's names do not tell.
    """
    group, inputs = quantization.group_size, parameter.inputs
    assert group is not None
    if not fusible(parameter, transform, group, config) or not all(name.endswith(".weight") for name in names):
        raise ValueError(f"{', '.join(names)}: not [outputs, inputs] in this family, so GPTQ cannot hold it")
    shaped = transform(np.broadcast_to(np.int8(0), parameter.shape), config)
    offset = 1 if quantization.symmetric else 0
    for position, (name, slot) in enumerate(zip(names, shaped, strict=True)):

        def part(kind: str, position: int = position) -> np.ndarray:
            """[outputs, inputs or groups] of this source."""
            return transform(canonical(read()[kind], parameter), config)[position].read()

        def words(part: Part = part) -> Iterator[np.ndarray]:
            yield _packed(part("values").T + np.int8(8))

        def zeros(part: Part = part) -> Iterator[np.ndarray]:
            stored = part("zeros").astype(np.float32) + (8 - offset)
            yield np.ascontiguousarray(_packed(stored.astype(np.uint8)).T)

        def scales(part: Part = part, name: str = name) -> Iterator[np.ndarray]:
            yield _as_float16(name, part("scales").astype(np.float32).T)

        prefix, outputs, groups = name.removesuffix(".weight"), slot.shape[0], inputs // group
        yield Outgoing(f"{prefix}.qweight", (inputs // 8, outputs), "I32", words)
        yield Outgoing(f"{prefix}.qzeros", (groups, math.ceil(outputs / 8)), "I32", zeros)
        yield Outgoing(f"{prefix}.scales", (groups, outputs), "F16", scales)
        yield Outgoing(f"{prefix}.g_idx", (inputs,), "I32", functools.partial(_order, inputs, group))


def _order(inputs: int, group: int) -> list[np.ndarray]:
    """The group of each input."""
    return [np.arange(inputs, dtype=np.int32) // np.int32(group)]


def _packed(values: np.ndarray) -> np.ndarray:
    """[count, columns] of 0..15 → [⌈count / 8⌉, columns] int32, the first value lowest."""
    rows = math.ceil(len(values) / 8)
    padded = np.zeros((8 * rows, values.shape[1]), np.uint32)
    padded[: len(values)] = values
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    return np.bitwise_or.reduce(padded.reshape(rows, 8, -1) << shifts, axis=1).view(np.int32)


def _as_float16(name: str, scales: np.ndarray) -> np.ndarray:
    if np.abs(scales).max() > 65504:
        raise ValueError(f"scales of {name} are beyond float16's 65504, in which GPTQ stores them")
    return scales.astype(np.float16)
