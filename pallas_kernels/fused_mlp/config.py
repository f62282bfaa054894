"""Tile sizes of the kernels, by shape."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_MEMORY = 227 * 1024
"""Bytes a block may use; two blocks share an SM up to half of 228 KB each, 1 KB of it reserved."""


@dataclass(frozen=True)
class StreamConfig:
    """For few tokens: the weights are read once, at the speed of memory."""

    rows: int
    """Tokens, padded to what the matrix unit takes: a multiple of 8."""
    consumers: int = 1
    """Warpgroups that multiply; each has 64 columns of the weights."""
    chunk: int = 64
    """Inputs that travel together."""
    stages: int = 4
    """Chunks in flight."""
    blocks: int | None = None
    """Persistent blocks; None: one for each tile."""
    split: int = 1
    """Blocks that share the inputs of a tile: a cluster."""
    lead: int = 0
    """Chunks that each block but the first of a cluster has less than its share: its sums travel meanwhile."""
    auto_barriers: bool = True


@dataclass(frozen=True)
class TiledConfig:
    """For many tokens: the matrix units are what takes the time."""

    columns: int = 128
    """Outputs of a tile, gate and up each."""
    stages: int = 4
    """Chunks of 64 inputs in flight."""
    group: int = 8
    """Tiles along the tokens whose columns are done together, so that the L2 cache holds both operands."""
    cluster: int = 2
    """Blocks, along the tokens, that share the loads of the weights."""


STREAMED_TOKENS = 64
"""Up to here time goes into reading the weights."""


def stream_config(tokens: int, inputs: int, parts: int, outputs: int, cores: int) -> StreamConfig:
    rows = -(-tokens // 8) * 8
    consumers = 2 if parts == 2 and outputs % 128 == 0 else 1
    split = 1
    if parts == 1 and inputs >= 2048:
        split = 2
    sums = (split - 1) * parts * rows * 64 * 4
    free = SHARED_MEMORY - consumers * (rows * 128 + sums) - 2048
    stage = 64 * 2 * (parts * 64 * consumers + rows)
    return StreamConfig(rows, consumers, stages=free // stage, split=split)


def tiled_config(tokens: int) -> TiledConfig:
    return TiledConfig(cluster=2 if tokens > 128 else 1)
