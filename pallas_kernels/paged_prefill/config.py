"""How the kernel of paged_prefill is cut up, by shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

ROWS = 64
"""Query rows of a warpgroup: what one matrix instruction takes."""
CONSUMERS = 2
"""Warpgroups that compute; one more loads."""
REGISTERS = (CONSUMERS + 1) * 168
"""Of one thread of each warpgroup: what 65536 allow 384 threads, in eights, at the launch."""


@dataclass(frozen=True)
class Config:
    """Tunables of the kernel."""

    heads: int
    """Query heads of one kv head that share a tile, and so its loads; the rest of ROWS are tokens."""
    keys: int
    """Tokens of the cache in a step."""
    stages: int
    """Steps that are loaded or in use at once."""
    share_output: bool
    """Whether results leave through the queries' memory: less of it, but the next queries wait."""
    consumer_registers: int = 232
    """A thread. Consumers take what the producer gives up of the 168 that each starts with; were there less, they would
    wait for it for ever."""
    producer_registers: int = 40
    blocks_per_core: int = 1
    """0: a block for every tile, scheduled by the hardware."""

    def __post_init__(self) -> None:
        used = CONSUMERS * self.consumer_registers + self.producer_registers
        if used > REGISTERS:
            raise ValueError(f"consumers and producer take {used} registers of {REGISTERS}: the kernel would not start")

    @property
    def rows_tokens(self) -> int:
        """Tokens of a warpgroup."""
        return ROWS // self.heads

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return CONSUMERS * self.rows_tokens


def tile_heads(q_per_kv: int) -> int:
    """The largest power of two that divides q_per_kv, at most 16: rows are (token, head), and every row is of use."""
    return min(q_per_kv & -q_per_kv, 16)


def choose(q_per_kv: int, head_dim: int, cache_dtype: Any) -> Config:
    """What an H200 runs fastest, within its 227 KB of shared memory a block and without spills."""
    heads = tile_heads(q_per_kv)
    if jnp.dtype(cache_dtype).itemsize == 1:  # the producer widens: it needs registers, and memory for what it widens
        stages = 4 if head_dim <= 128 else 2
        return Config(heads, 64, stages, share_output=True, consumer_registers=208, producer_registers=88)
    if head_dim <= 128:
        return Config(heads, keys=128, stages=2, share_output=False)
    return Config(heads, keys=64, stages=2, share_output=head_dim > 192)
