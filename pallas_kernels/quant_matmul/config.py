"""How the kernel of quant_matmul is cut, and where it is used."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from pallas_kernels.formats import Format, QuantizedArray
from pallas_kernels.target import Target

SHARED_MEMORY = 227 * 1024 - 512
"""Bytes a block may have on Hopper, less what barriers take."""
WARPGROUP = 64
"""Rows of one wgmma."""
LINE = 128
"""Bytes."""
ALIGNED = 1024
"""Bytes at whose multiples arrays begin in shared memory; those of scales end anywhere."""


@dataclass(frozen=True)
class Config:
    """Tunables."""

    rows: int
    """Of x in a tile: wgmma's N, a multiple of 8 up to 256."""
    consumers: int
    """Warpgroups that multiply, in a block; each takes 64 outputs."""
    depth: int
    """Inputs of a consumer in a stage."""
    stages: int
    blocks: int
    """At once on the GPU; a multiple of `split`."""
    split: int = 1
    """Blocks that share the inputs of a tile; 1 where halves of the outputs are combined. Clusters of more than 2 leave
    multiprocessors without one."""
    height: int = WARPGROUP
    """Outputs a consumer takes of its 64: fewer, in eights, where tiles then spread over all of the GPU."""
    ways: int = 1
    """Consumers of the same outputs; each takes every so many-th piece of the inputs."""


@dataclass(frozen=True)
class Weight:
    """What of a weight of [outputs, inputs] decides how the kernel is cut."""

    outputs: int
    inputs: int
    format: Format
    group_size: int | None
    narrow: bool
    """Whether x has its 8 bits, too."""
    room: tuple[int, int] = (0, 0)
    """As in `choose`."""

    @property
    def x_bytes(self) -> int:
        return 1 if self.narrow else 2

    @property
    def per_byte(self) -> int:
        return 2 if self.format == "int4" else 1


def row_scales(rows: int) -> int:
    """How many scales of rows a tile loads: the copy engine writes where 128 bytes begin, so a place has as many."""
    return max(rows, LINE // 4)


def choose(
    rows: int,
    weight: QuantizedArray,
    out_bytes: int,
    target: Target,
    parts: int = 1,
    narrow: bool = False,
    room: tuple[int, int] = (0, 0),
) -> Config | None:
    """The fastest, by `cycles`, for x of [rows, inputs] and a weight of [outputs, inputs].

    parts: 2 if the halves of the outputs are combined; narrow: whether x has the weight's 8 bits; room: for a norm of
    x, as `Norm.room` says. None if the kernel cannot be cut for them, or here.
    """
    if rows == 0 or target.lacks_hopper() is not None:
        return None
    return _choose(rows, weight_of(weight, narrow, room), out_bytes, target, parts)


def weight_of(weight: QuantizedArray, narrow: bool, room: tuple[int, int] = (0, 0)) -> Weight:
    return Weight(weight.outputs[0], weight.inputs, weight.format, weight.group_size, narrow, room)


@functools.cache
def _choose(rows: int, weight: Weight, out_bytes: int, target: Target, parts: int) -> Config | None:
    cuts = list(_cuts(rows, weight, out_bytes, target, parts))
    return min(cuts, key=lambda cut: cycles(rows, weight, cut, target), default=None)


def cycles(rows: int, weight: Weight, config: Config, target: Target) -> float:
    """About what a multiprocessor takes, launch and first loads (5 us) apart.

    Fitted to some 60 cuts on an H200. Widening and matrix units did not overlap, whatever was tried; loads do.
    """
    grouped, taken, per_byte = weight.format == "int4", config.consumers // config.ways, weight.per_byte
    tiles = -(-weight.outputs // config.height // taken) * -(-rows // config.rows)
    turns = -(-tiles // (target.cores // config.split))
    inputs = weight.inputs / config.split
    read = taken * config.height * inputs / per_byte
    loaded = read + config.rows * inputs * weight.x_bytes
    products = taken * WARPGROUP * inputs
    widened = products / (WIDENED_INT4 if grouped else WIDENED) * (NARROW if config.depth // per_byte < 128 else 1.0)
    multiplied = products * max(config.rows, 16) / MULTIPLIED
    if weight.narrow:
        widened, multiplied = 0.0, multiplied / 2
    turn = max(read / READ, loaded / LOADED, widened + multiplied) + DISTURBED * read / READ
    turn *= SHALLOW if config.stages < 3 else 1.0
    return turns * (turn + TURN) + (MEETING if config.split > 1 else 0.0)


READ, LOADED = 20.0, 64.0
"""Bytes a multiprocessor takes in a cycle while all do, of the weight from memory, with x from the L2 cache."""
WIDENED, WIDENED_INT4, MULTIPLIED = 34.0, 50.0, 2048.0
"""In a cycle: inputs of an output, and products."""
NARROW, SHALLOW, DISTURBED = 1.4, 1.2, 0.05
"""Widening takes longer where rows of the weight come in less than 128 bytes, all of it with two stages only; reading
takes some of the time of the rest."""
TURN, MEETING = 1500.0, 1200.0
"""Cycles of a tile's end, and of adding the sums of two blocks."""


def shared_memory(weight: Weight, config: Config, parts: int, out_bytes: int) -> int:
    """Bytes of a block, but for barriers."""
    rows, ways, slabs = config.rows, config.ways, config.consumers // config.ways
    stage = ways * config.depth * (slabs * WARPGROUP // weight.per_byte + rows * weight.x_bytes + weight.room[0])
    sums = (config.consumers - slabs // parts) * WARPGROUP * rows * 4
    steps = weight.inputs // config.split // ways // config.depth
    scaled = (slabs * WARPGROUP if weight.per_byte == 1 else 0) + (row_scales(rows) if weight.narrow else 0)
    scales = (config.stages // steps + 2) * scaled * 4 + (2 * ALIGNED if weight.narrow else 0)
    return config.stages * stage + sums + slabs // parts * rows * WARPGROUP * out_bytes + scales + weight.room[1]


def loses(
    rows: int, weight: QuantizedArray, config: Config, target: Target, parts: int, narrow: bool = False
) -> str | None:
    """Why XLA is at least as fast, as measured on an H200; None: the kernel is faster. narrow: as in `choose`."""
    if weight.format == "int4":
        return None
    if narrow and rows >= MANY:
        return f"from {MANY} rows of 8 bits on XLA's matmul is as fast"
    if not narrow and weight.format == "fp8" and 8 < rows <= WARPGROUP and config.ways == parts == 1:
        return "with 9 to 64 rows and fp8 XLA's matmul is as fast"
    blocks = -(-weight.outputs[0] // config.height // (config.consumers // config.ways)) * -(-rows // config.rows)
    blocks *= config.split
    busy = blocks / (-(-blocks // target.cores) * target.cores)
    if rows > WARPGROUP and busy < BUSY:
        return f"its tiles keep only {busy:.0%} of the multiprocessors busy"
    return None


MANY = 512
BUSY = 0.65
"""Share of the multiprocessors that tiles of many rows must keep busy: with 73 % it takes 0.7 of XLA's time."""


def _cuts(rows: int, weight: Weight, out_bytes: int, target: Target, parts: int) -> Iterator[Config]:
    """Of each kind that with the deepest stages of which there is room for three, or two."""
    outputs, grouped, per_byte = weight.outputs // parts, weight.format == "int4", weight.per_byte
    fitting = next((n for n in (8, 16, 32, 64, 128) if n >= rows), 128)
    # Sums of 256 rows leave no registers for others: int4's of a group, fp8's of a stage.
    wide = rows > 128 and not grouped and not (weight.narrow and weight.format == "fp8")
    heights = [h for h in ((WARPGROUP,) if grouped else range(WARPGROUP, 32, -8)) if outputs % h == 0]
    # The copy engine stores rows of outputs in whole lines of 128 bytes, or in one that is shorter.
    heights = [h for h in heights if h * out_bytes % LINE == 0 or h * out_bytes < LINE]
    kinds = itertools.product((128, 256) if wide else (fitting,), (4, 2), (1, 2, 4), (1, 2), heights)
    for tile_rows, consumers, ways, split, height in kinds:
        if consumers % (ways * parts) or weight.inputs % (ways * split) or split > target.cores:
            continue
        if split > 1 and parts > 1:  # blocks add their sums after halves are combined, which takes whole sums
            continue
        if tile_rows > 64 and consumers > 2:  # their sums do not fit into registers
            continue
        if weight.narrow and tile_rows > 128 and split > 1 and ways > 1:  # nor do those that meet twice
            continue
        part = weight.inputs // (split * ways)
        depths = [d for d in (256 * per_byte, 128 * per_byte, 128, 64) if part % d == 0]
        depths = [d for d in depths if _groups_fit(weight.group_size, part, d)]
        ways_to_fill = [(d, n) for least in (3, 2) for d in depths for n in range(12, least - 1, -1)]
        for depth, stages in ways_to_fill:
            blocks = target.cores // split * split
            cut = Config(tile_rows, consumers, depth, stages, blocks, split, height, ways)
            if shared_memory(weight, cut, parts, out_bytes) <= SHARED_MEMORY:
                yield cut
                break


def _groups_fit(group_size: int | None, part: int, depth: int) -> bool:
    """Scales of int4 are loaded 8 groups of an output at a time, two to a register."""
    if group_size is None:
        return True
    return depth % group_size == 0 and depth <= 8 * group_size <= part and part // group_size % 2 == 0
