"""How the kernel of quant_matmul is cut, and where it is used."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pallas_kernels.formats import QuantizedArray
from pallas_kernels.target import Target

SHARED_MEMORY = 227 * 1024
"""Bytes a block may have on Hopper."""
WARPGROUP = 64
"""Rows of one wgmma."""


@dataclass(frozen=True)
class Config:
    """Tunables."""

    rows: int
    """Of x in a tile: wgmma's N, a multiple of 8 up to 256."""
    consumers: int
    """Warpgroups of 64 outputs each, in a block."""
    depth: int
    """Inputs in a stage."""
    stages: int
    blocks: int
    """At once on the GPU; a multiple of `split`."""
    split: int = 1
    """Blocks that share the inputs of a tile."""
    height: int = WARPGROUP
    """Outputs a consumer takes of its 64: fewer, in eights, where tiles then spread over all of the GPU."""


def shared_memory(rows: int, consumers: int, depth: int, stages: int, per_byte: int, out_bytes: int) -> int:
    """Bytes of a block."""
    stage = consumers * WARPGROUP * depth // per_byte + rows * depth * 2
    return stages * (stage + consumers * WARPGROUP * 4) + consumers * (rows * WARPGROUP * out_bytes + 1024) + 2048


def choose(rows: int, weight: QuantizedArray, out_bytes: int, target: Target) -> Config | None:
    """For x of [rows, inputs] and a weight of [outputs, inputs]; None if the kernel cannot be cut for them, or here."""
    if rows == 0 or target.lacks_hopper() is not None:
        return None
    outputs, grouped = weight.outputs[0], weight.format == "int4"
    per_byte = 2 if grouped else 1
    tile_rows = next((n for n in (8, 16, 32, 64, 128) if n >= rows), 128 if grouped else 256)
    heights = [h for h in ((WARPGROUP,) if grouped else range(WARPGROUP, 32, -8)) if outputs % h == 0]
    best: tuple[float, Config] | None = None
    for consumers, height, split in itertools.product((4, 2), heights, (1, 2, 4)):
        if tile_rows > 64 and (split > 1 or consumers > 2):
            continue
        config = _cut(rows, tile_rows, consumers, height, split, weight, per_byte, out_bytes, target)
        if config is None:
            continue
        tiles = -(-outputs // height // consumers) * -(-rows // tile_rows)
        turns = -(-tiles // (target.cores // split))
        cost = turns * (consumers * height * weight.inputs / split / per_byte + TURN) + (MEETING if split > 1 else 0)
        if best is None or cost < best[0]:
            best = cost, config
    return None if best is None else best[1]


TURN, MEETING = 20e3, 40e3
"""Costs of a tile's beginning and end, and of adding the sums of several blocks, in bytes read meanwhile by a block."""


def _groups_fit(group_size: int | None, part: int, depth: int) -> bool:
    """Scales of int4 are loaded 8 groups of an output at a time, two to a register."""
    if group_size is None:
        return True
    return depth % group_size == 0 and depth <= 8 * group_size <= part and part // group_size % 2 == 0


def _cut(
    rows: int,
    tile_rows: int,
    consumers: int,
    height: int,
    split: int,
    weight: QuantizedArray,
    per_byte: int,
    out_bytes: int,
    target: Target,
) -> Config | None:
    """The deepest stages of which there is room for three, or two."""
    part = weight.inputs // split
    for least, depth in itertools.product((3, 2), (256 * per_byte, 128 * per_byte, 128, 64)):
        if part * split != weight.inputs or part % depth or not _groups_fit(weight.group_size, part, depth):
            continue
        fixed = shared_memory(tile_rows, consumers, depth, 0, per_byte, out_bytes)
        stages = (SHARED_MEMORY - fixed) // (shared_memory(tile_rows, consumers, depth, 1, per_byte, out_bytes) - fixed)
        if stages >= least:
            return Config(tile_rows, consumers, depth, min(stages, 12), target.cores // split * split, split, height)
    return None
