"""A case of the kernel benchmark: what is computed, by which programs, how right and how fast it must be.

    def cases() -> list[Case]:
        return [
            Case(
                name="int8 4096x28672 M=16",
                op="quant_matmul",
                inputs=lambda key: (jax.random.normal(key, (16, 4096), jnp.bfloat16), random_weight(key)),
                programs={
                    "mosaic": Program(functools.partial(quant_matmul, target=H200, implementation="mosaic")),
                    "bf16": Program(jnp.matmul, prepare=lambda x, w: (x, dequantize(w)), autotuned=True),
                },
                reference=reference, tolerance=5e-3,
                bytes=4096 * 28672, flops=2 * 16 * 4096 * 28672, min_share=0.78,
            )
        ]

Everything is a function of abstract shapes, so that it compiles for a GPU on a machine that has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Program:
    """One way to compute a case."""

    fn: Callable[..., Any]
    """Takes the case's inputs, as `prepare` left them. Is jitted; options are bound (`functools.partial`)."""
    prepare: Callable[..., tuple[Any, ...]] | None = None
    """The case's inputs to this program's own arguments: contiguous keys, weights in bfloat16, the plan of a step. Not
    timed. None: as they are."""
    in_place: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Argument → the output (of a tuple) that is the same memory updated: donated, and passed to the next call."""
    result: Callable[[Any], Any] | None = None
    """What this program returns to what the reference returns, should the layouts differ. None: as it is."""
    autotuned: bool = False
    """XLA or cuDNN times candidates, which needs the GPU: it is never compiled ahead. True of rivals with matmuls."""


@dataclass(frozen=True)
class Case:
    """The first program is ours; the others are what it is compared with. All are held to the reference.

    Each program gets `inputs(key)` of several keys in turn, enough of them that none is found in the L2 cache.
    """

    name: str
    """Unique among the cases of its op: dtype and shape, such as "int8 64x1024"."""
    op: str
    inputs: Callable[[jax.Array], tuple[Any, ...]]
    """From a PRNG key to pytrees of arrays. Is jitted, and runs on the device: GBs never cross the bus."""
    programs: Mapping[str, Program]
    reference: Callable[..., Any]
    """From the inputs to the expected outputs in float32, computed plainly. Is jitted; mind its temporaries."""
    tolerance: float
    """Largest relative error of a row (last dimension): |computed - expected| / |expected|, Euclidean. NaN fails."""
    bytes: int
    """That must be read and written."""
    flops: int
    """Multiplications and additions that must be done (causal: only what is not masked)."""
    min_share: float | None = None
    """Target: this much of the read ceiling, 0.96 say."""
    min_tflops: float | None = None
    """Target: 10**12 operations a second."""
    max_ratio: tuple[str, float] | None = None
    """Target: (another program, ours takes at most this much of its time)."""

    @property
    def full_name(self) -> str:
        return f"{self.op} {self.name}"
