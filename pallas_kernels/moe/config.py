"""Sizes of tiles and the number of blocks, from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import QuantizedArray

type Weight = jax.Array | QuantizedArray

SHARED_MEMORY = 225 * 1024
"""Bytes a block may use for its ring; what is left of 227 KiB holds barriers."""
LANES = 64
"""Columns of a consumer that streams weights: the rows of a wgmma."""
DEPTH = 64
"""Inputs of a step: 128 bytes, as far as the swizzle reaches."""
PREFILL_TILE = 128
"""Rows: two consumers of 64."""
DECODE_TILES = (8, 16, 32, 64, 128)
MOST_SCALES = 8
"""Groups of 4-bit weights whose scales are loaded together: 16 bytes, of mxfp4 8."""
MOST_INT4_ROWS = 32
"""More would not leave registers for the sum of a group beside the sum of all."""
LEAST_STEPS = 8
"""Of a block's share of the inputs."""
BUSY = 0.9
"""Units of work for each core with which memory is read at full speed."""
MOST_DECODE_ROWS = 64
"""Up to so many rows an expert on average, streaming the weights wins."""


def xla_tile(choices: int, num_experts: int, platform: str) -> int:
    """Rows of a tile of the XLA version: large where an expert expects many rows."""
    small, large = (8, 64) if platform == "cpu" else (16, 128)
    return small if choices <= num_experts * small else large


def weight_shape(weight: Weight) -> tuple[int, ...]:
    """[experts, inputs, *outputs], however it is stored."""
    if isinstance(weight, QuantizedArray):
        return weight.outputs[0], weight.inputs, *weight.outputs[1:]
    return weight.shape


def least_depth(weight: QuantizedArray) -> int:
    """What must divide the inputs: those of the shortest step."""
    return 2 * DEPTH if weight.group_size is None or weight.group_size > DEPTH else DEPTH


@dataclass(frozen=True)
class DecodeConfig:
    """Of the kernel that streams weights past few rows."""

    tile: int
    """Rows of a tile: N of a wgmma, a multiple of 8."""
    blocks: int
    consumers: int
    """Warpgroups of 64 columns each."""
    depth: int
    """Inputs of a step."""
    stages: int
    splits: int
    """Blocks that share the inputs of a tile."""
    band: int
    """Row tiles that are walked together."""

    @property
    def registers(self) -> int | None:
        """Of a consumer's thread once the producer has given up its own: more than the launch gave would never come.

        None: one consumer has enough from the start.
        """
        given = 65536 // 128 // (self.consumers + 1) // 8 * 8
        return None if self.consumers == 1 else (given * (self.consumers + 1) - 40) // self.consumers // 8 * 8


@dataclass(frozen=True)
class PrefillConfig:
    """Of the kernel for many rows."""

    blocks: int
    piece: int
    """Columns of a tile: of gate and of up, or of a plain product."""
    stages: int
    band: int
    """Row tiles that are walked together."""
    tile: int = PREFILL_TILE


def suits_prefill(choices: int, num_experts: int, *weights: Weight) -> bool:
    """Whether the kernel for many rows runs. choices: tokens x top_k."""
    plain = not any(isinstance(weight, QuantizedArray) for weight in weights)
    return plain and choices > MOST_DECODE_ROWS * num_experts


def row_tile(choices: int, num_experts: int, *weights: Weight) -> int:
    """Rows of a tile, for all of these weights: nearly every expert, were the choices drawn evenly, has no more."""
    if suits_prefill(choices, num_experts, *weights):
        return PREFILL_TILE
    mean = choices / min(num_experts, choices)
    grouped = any(isinstance(weight, QuantizedArray) and weight.group_size is not None for weight in weights)
    tiles = [tile for tile in DECODE_TILES if not grouped or tile <= MOST_INT4_ROWS]
    return next((tile for tile in tiles if tile >= mean + 3.0 * math.sqrt(mean)), tiles[-1])


def prefill(width: int, dtype: Any, *, gated: bool, cores: int) -> PrefillConfig:
    """width: columns of the result."""
    piece = next(piece for piece in ((128, 64) if gated else (256, 192, 128, 64)) if width % piece == 0)
    columns, itemsize = piece * (2 if gated else 1), jnp.dtype(dtype).itemsize
    staging = 2 * PREFILL_TILE * LANES * itemsize
    ring = DEPTH * (PREFILL_TILE + columns) * itemsize
    return PrefillConfig(cores, piece, min((SHARED_MEMORY - staging) // ring, 6), band=16)


def decode(
    tile: int, choices: int, weight: Weight, inputs: int, width: int, dtype: Any, *, gated: bool, cores: int
) -> DecodeConfig:
    """weight: of [experts, inputs, ...]; width: columns of the result."""
    quantized, itemsize = isinstance(weight, QuantizedArray), jnp.dtype(dtype).itemsize
    num_experts = weight_shape(weight)[0]
    touched = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** choices)
    tiles = max(touched, choices / tile)
    busy = width % (2 * LANES) == 0 and tiles * width / (2 * LANES) >= BUSY * cores
    consumers = 2 if busy or (not gated and width % (2 * LANES) == 0) else 1
    deep = inputs % (2 * DEPTH) == 0 and (quantized or not gated)
    depth, per_weight, least = (2 * DEPTH if deep else DEPTH), float(itemsize), LEAST_STEPS
    if isinstance(weight, QuantizedArray):
        per_weight = 1.0 if weight.group_size is None else 0.5
        if weight.group_size is not None:
            depth *= 2 if inputs % (2 * depth) == 0 and weight.group_size >= DEPTH else 1
            least = max(least, MOST_SCALES * weight.group_size // depth)
    splits = 1 if gated else _splits(tiles * width / (LANES * consumers), inputs // depth, least, cores)
    ring = int(depth * (LANES * consumers * (2 if gated else 1) * per_weight + tile * itemsize))
    return DecodeConfig(tile, cores, consumers, depth, min(SHARED_MEMORY // ring, 8), splits, band=4)


def _splits(units: float, steps: int, least: int, cores: int) -> int:
    """Blocks that share a tile's inputs: as few as keep the GPU busy, with at least so many steps each."""
    options = [splits for splits in (1, 2, 4, 8) if steps % splits == 0 and steps // splits >= least]
    return min((splits for splits in options if units * splits >= BUSY * cores), default=max(options, default=1))
