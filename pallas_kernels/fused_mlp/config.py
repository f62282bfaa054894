"""Tile sizes of the kernels, by shape: what measurements on an H200 say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

SHARED_MEMORY = 226 * 1024
"""Bytes that a block's ring and buffers may take together; barriers come on top."""
STREAMED_TOKENS = 64
"""Up to here time goes into reading the weights."""
PAIRED_TOKENS = 256
"""Up to here a projection without a gate has few tiles: blocks alone or in pairs."""
BUSY = 0.8
"""Share of the multiprocessors that tiles must keep busy for a kernel to win; measured with 0.85 and more."""

SPLIT_INPUTS = 8192
"""From here two blocks share the inputs of a tile without a gate. With 4096, a block for each tile was faster, although
64 or 96 tiles leave multiprocessors idle."""

SHAPES = {2: ((2, 1), (1, 1), (1, 2)), 1: ((1, 1), (1, 2))}
"""By parts: consumers of a block, blocks of a cluster; the faster first. Clusters of 4 leave multiprocessors idle."""

PAIRS = {
    128: ((1, 1, 2, False), (1, 1, 1, False), (1, 2, 1, False)),
    256: ((1, 1, 2, True), (2, 1, 2, True), (1, 2, 1, False)),
}
"""By tokens, up to: consumers, split, row_tiles and share of a PairConfig; the better first."""
PAIRS_BUSY = 0.7
"""Share of the multiprocessors that have a block."""


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
    """Persistent blocks (clusters, if split); None: one for each tile."""
    split: int = 1
    """Blocks that share the inputs of a tile: a cluster."""


@dataclass(frozen=True)
class TiledConfig:
    """For many tokens: the matrix units are what takes the time."""

    columns: int = 128
    """Outputs of a tile, gate and up each."""
    stages: int = 4
    """Chunks of 64 inputs in flight."""
    group: int = 8
    """Tiles along the tokens whose columns are done together, so that the L2 cache holds both operands."""


@dataclass(frozen=True)
class PairConfig:
    """For 65 to 256 tokens without a gate: blocks alone or in pairs, all at the same time."""

    rows: int
    """Tokens of a block: a multiple of 8 · split, up to 256."""
    consumers: int = 1
    """Warpgroups that multiply, up to 4; each has 64 columns of the weights."""
    split: int = 1
    """2: a pair shares the inputs of a tile."""
    row_tiles: int = 1
    """Blocks with other tokens and the same weights."""
    share: bool = False
    """Whether two of these read the weights together; not if split."""
    chunk: int = 64
    """Inputs that travel together."""
    deal: int = 1
    """2: two consumers have the same columns, and the chunks in turn."""
    stages: int = 4
    """Chunks in flight, a multiple of `deal`."""

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.consumers // self.deal * 64

    def with_stages(self) -> PairConfig:
        """As many chunks in flight as fit."""
        buffers = self.width * self.rows * (2 // self.split + 4 * (self.deal - 1))
        chunk_bytes = self.chunk * 2 * (self.width + self.rows)
        stages = (SHARED_MEMORY - buffers) // chunk_bytes
        return dataclasses.replace(self, stages=stages // self.deal * self.deal)

    @property
    def registers(self) -> int:
        """Of a thread of a consumer; the producer leaves them what it does not need."""
        return {1: 232, 2: 232, 3: 152, 4: 104}[self.consumers]


def busy(tiles: int, cores: int) -> float:
    """Share of all multiprocessors' time that equal tiles fill."""
    return tiles / (-(-tiles // cores) * cores)


def stream_config(
    tokens: int, inputs: int, parts: int, outputs: int, cores: int, beside: tuple[int, int] = (0, 0)
) -> StreamConfig:
    """parts: 2 for gate and up; outputs: a multiple of 64, of each part; beside: bytes of a norm, of each input of a
    chunk, and of all (`Fold.room`).
    """
    rows = -(-tokens // 8) * 8
    # The first that keeps most busy, else the one that keeps the most so.
    shapes = SHAPES[parts] if parts == 2 or inputs >= SPLIT_INPUTS else ((1, 1),)
    consumers, split = max(shapes, key=lambda shape: min(_stream_busy(inputs, outputs, shape, cores), BUSY))
    buffers = consumers * rows * (64 * 2 + (split - 1) * parts * 64 * 4) + beside[1]
    chunk_bytes = 64 * (2 * (parts * 64 * consumers + rows) + beside[0])
    chunks = (SHARED_MEMORY - buffers) // chunk_bytes
    # Twice the inputs at a time is faster, as long as three of them fit.
    chunk = 128 if inputs % 128 == 0 and chunks >= 6 else 64
    tiles = outputs // (64 * consumers)
    return StreamConfig(rows, consumers, chunk, chunks * 64 // chunk, min(tiles, cores // split), split)


def pair_config(tokens: int, inputs: int, outputs: int, cores: int) -> PairConfig:
    """tokens: up to PAIRED_TOKENS; outputs: a multiple of 64."""

    def occupied(shape: tuple[int, int, int, bool]) -> float:
        consumers, split, row_tiles, _ = shape
        blocks = outputs // (64 * consumers) * split * row_tiles
        fits = outputs % (64 * consumers) == 0 and inputs >= 64 * split and blocks <= cores
        return blocks / cores if fits else 0.0

    shapes = PAIRS[128 if tokens <= 128 else 256]
    consumers, split, row_tiles, share = max(shapes, key=lambda shape: min(occupied(shape), PAIRS_BUSY))
    rows = -(-tokens // (row_tiles * 8 * split)) * 8 * split
    return PairConfig(rows, consumers, split, row_tiles, share).with_stages()


def _stream_busy(inputs: int, outputs: int, shape: tuple[int, int], cores: int) -> float:
    consumers, split = shape
    fits = outputs % (64 * consumers) == 0 and inputs >= (128 * split if split > 1 else 1)
    return busy(outputs // (64 * consumers) * split, cores) if fits else 0.0


def tiled_busy(tokens: int, outputs: int, cores: int) -> float:
    """Share of the multiprocessors that `tiled` keeps busy."""
    return busy(-(-tokens // 128) * -(-outputs // TiledConfig.columns), cores)
