"""Sizes of tiles and the number of blocks, from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

SHARED_MEMORY = 225 * 1024
"""Bytes a block may use for its ring; what is left of 227 KiB holds barriers."""
LANES = 64
"""Columns of a consumer that streams weights: the rows of a wgmma."""
DEPTH = 64
"""Inputs of a step: 128 bytes, as far as the swizzle reaches."""
PREFILL_TILE = 128
"""Rows: two consumers of 64."""
DECODE_TILES = (8, 16, 32, 64, 128)
MOST_DECODE_ROWS = 64
"""Up to so many rows an expert on average, streaming the weights wins."""


def xla_tile(choices: int, num_experts: int, platform: str) -> int:
    """Rows of a tile of the XLA version: large where an expert expects many rows."""
    small, large = (8, 64) if platform == "cpu" else (16, 128)
    return small if choices <= num_experts * small else large


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


type Config = DecodeConfig | PrefillConfig


def choose(
    choices: int, num_experts: int, inputs: int, width: int, dtype: Any, *, gated: bool, cores: int
) -> DecodeConfig | PrefillConfig:
    """choices: tokens x top_k, of which an expert expects its even share; width: columns of the result."""
    mean = choices / min(num_experts, choices)
    itemsize = jnp.dtype(dtype).itemsize
    if choices > MOST_DECODE_ROWS * num_experts:
        return _prefill(width, itemsize, gated, cores)
    wanted = mean + 3.0 * math.sqrt(mean)
    tile = min(tile for tile in DECODE_TILES if tile >= wanted or tile == DECODE_TILES[-1])
    consumers = 2 if width % (2 * LANES) == 0 else 1
    depth = 2 * DEPTH if not gated and inputs % (2 * DEPTH) == 0 else DEPTH
    touched = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** choices)
    splits = 1 if gated else _splits(touched * width / (LANES * consumers), inputs // depth, cores)
    ring = depth * (LANES * consumers * (2 if gated else 1) + tile) * itemsize
    return DecodeConfig(tile, cores, consumers, depth, min(SHARED_MEMORY // ring, 8), splits, band=8)


def _splits(units: float, steps: int, cores: int) -> int:
    """Blocks that share a tile's inputs: so many that every block has about four turns, of at least 8 steps each."""
    options = [splits for splits in (1, 2, 4, 8) if steps % splits == 0 and steps // splits >= 8]
    enough = [splits for splits in options if units * splits >= 4 * cores]
    return min(enough, default=max(options, default=1))


def _prefill(width: int, itemsize: int, gated: bool, cores: int) -> PrefillConfig:
    piece = next(piece for piece in ((128, 64) if gated else (256, 192, 128, 64)) if width % piece == 0)
    columns = piece * (2 if gated else 1)
    staging = 2 * PREFILL_TILE * LANES * itemsize
    ring = DEPTH * (PREFILL_TILE + columns) * itemsize
    return PrefillConfig(cores, piece, min((SHARED_MEMORY - staging) // ring, 6), band=16)
