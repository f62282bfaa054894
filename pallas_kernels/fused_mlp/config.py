"""Tile sizes of the kernels, by shape: what measurements on an H200 say."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_MEMORY = 226 * 1024
"""Bytes that a block's ring and buffers may take together; barriers come on top."""
STREAMED_TOKENS = 64
"""Up to here time goes into reading the weights."""
SPLIT_TOKENS = 128
"""Up to here the same of a projection without a gate, if there are two multiprocessors for each tile."""
PAIRED_TOKENS = 256
"""Up to here a projection without a gate has few tiles: blocks alone or in pairs."""
BUSY = 0.8
"""Share of the multiprocessors that tiles must keep busy for a kernel to win; measured with 0.85 and more."""

SPLIT_INPUTS = 8192
"""From here two blocks share the inputs of a tile without a gate. With 4096, a block for each tile was faster, although
64 or 96 tiles leave multiprocessors idle."""

SHAPES = {2: ((2, 1), (1, 1), (1, 2)), 1: ((1, 1), (1, 2))}
"""By parts: consumers of a block, blocks of a cluster; the faster first. Clusters of 4 leave multiprocessors idle."""

PAIRS = {192: ((1, True), (1, False)), 256: ((1, True), (2, True), (1, False))}
"""By tokens, up to: consumers and pairs of a PairConfig; the faster first."""
PAIRS_BUSY = 0.7
"""Share of the multiprocessors that must have a block of these for the kernel to win; measured with 0.73 and 0.97."""


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
    """For 65 to 256 tokens without a gate: a block for each tile, all at the same time."""

    rows: int
    """Tokens of a block: a multiple of 8, up to 256."""
    consumers: int = 1
    """Warpgroups that multiply, 1 or 2; each has 64 columns of the weights."""
    pairs: bool = False
    """Two blocks have the same columns and half of the tokens each; they read the weights together."""
    chunk: int = 64
    """Inputs that travel together."""
    stages: int = 4
    """Chunks in flight."""


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
    halved = parts == 2 or inputs >= SPLIT_INPUTS or tokens > STREAMED_TOKENS
    shapes = SHAPES[parts] if halved else ((1, 1),)
    consumers, split = max(shapes, key=lambda shape: min(_stream_busy(inputs, outputs, shape, cores), BUSY))
    buffers = consumers * rows * (64 * 2 + (split - 1) * parts * 64 * 4) + beside[1]
    chunk_bytes = 64 * (2 * (parts * 64 * consumers + rows) + beside[0])
    chunks = (SHARED_MEMORY - buffers) // chunk_bytes
    # Twice the inputs at a time is faster, as long as three of them fit; of more tokens it was not measured.
    chunk = 128 if inputs % 128 == 0 and chunks >= 6 and tokens <= STREAMED_TOKENS else 64
    tiles = outputs // (64 * consumers)
    return StreamConfig(rows, consumers, chunk, chunks * 64 // chunk, min(tiles, cores // split), split)


def streams(tokens: int, outputs: int, cores: int) -> bool:
    """Whether a projection without a gate is `stream`'s. outputs: a multiple of 64."""
    return tokens <= STREAMED_TOKENS or (tokens <= SPLIT_TOKENS and 2 * (outputs // 64) <= cores)


def pair_config(tokens: int, outputs: int, cores: int) -> PairConfig:
    """tokens: up to PAIRED_TOKENS; outputs: a multiple of 64."""
    shapes = next(shapes for most, shapes in PAIRS.items() if tokens <= most)
    consumers, pairs = max(shapes, key=lambda shape: min(_pairs_busy(outputs, shape, cores), PAIRS_BUSY))
    rows = -(-tokens // (8 * (1 + pairs))) * 8
    stages = (SHARED_MEMORY - consumers * rows * 64 * 2) // (64 * 2 * (consumers * 64 + rows))
    return PairConfig(rows, consumers, pairs, stages=stages)


def pairs_busy(tokens: int, outputs: int, cores: int) -> float:
    """Share of the multiprocessors that have a block of `paired`; 0 if they are too few for all at the same time."""
    config = pair_config(tokens, outputs, cores)
    return _pairs_busy(outputs, (config.consumers, config.pairs), cores)


def _pairs_busy(outputs: int, shape: tuple[int, bool], cores: int) -> float:
    consumers, pairs = shape
    blocks = outputs // (64 * consumers) * (1 + pairs)
    return blocks / cores if outputs % (64 * consumers) == 0 and blocks <= cores else 0.0


def _stream_busy(inputs: int, outputs: int, shape: tuple[int, int], cores: int) -> float:
    consumers, split = shape
    fits = outputs % (64 * consumers) == 0 and inputs >= (128 * split if split > 1 else 1)
    return busy(outputs // (64 * consumers) * split, cores) if fits else 0.0


def tiled_busy(tokens: int, outputs: int, cores: int) -> float:
    """Share of the multiprocessors that `tiled` keeps busy."""
    return busy(-(-tokens // 128) * -(-outputs // TiledConfig.columns), cores)
