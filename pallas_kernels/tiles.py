"""How much the portable versions of attention take at once, by platform."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Sizes in tokens."""

    decode_keys: int
    """Cache that paged_decode reads at once."""
    decode_whole_tables: bool
    """Whether it reads block tables to their end, in a loop of a length known to the compiler, or stops at the longest
    sequence."""
    prefill_rows: int
    """Queries of one sequence that paged_prefill takes together."""
    prefill_keys: int
    """Cache that they read at once."""


CPU = Tiles(decode_keys=256, decode_whole_tables=False, prefill_rows=64, prefill_keys=256)
GPU = Tiles(decode_keys=2048, decode_whole_tables=True, prefill_rows=256, prefill_keys=1024)
"""A loop whose length depends on data makes a GPU wait for the host in every turn: none, or few large ones."""


def for_platform(platform: str) -> Tiles:
    """platform: as in `jax.Device.platform`."""
    return CPU if platform == "cpu" else GPU
