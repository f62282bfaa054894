"""How a model is run: quantization, cache, mesh and engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

type WeightFormat = Literal["int8", "int4", "fp8", "mxfp4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("int8", "int4", "fp8")
"""Those that may be asked for. In mxfp4 experts are kept where a checkpoint has them so."""


def at_least_one(name: str, value: int, otherwise: str = "") -> int:
    """The value. Raises ValueError unless it is an integer, 1 or more; otherwise: what else it may be, for people."""
    if not hasattr(value, "__index__") or isinstance(value, bool):  # numpy's are integers too
        raise ValueError(f"{name} is {value!r}; it must be an integer{otherwise}")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1{otherwise}")
    return value


@dataclass(frozen=True)
class Quantization:
    """How the projections are stored, instead of in the model's dtype."""

    format: WeightFormat
    group_size: int | None = None
    """int4: inputs that share a scale; None: the largest that the model's projections allow."""
    symmetric: bool = True
    """int4: without zero points."""
    head: bool = True
    """int8 and fp8: an untied head too; int4 leaves it as it is."""
    experts: bool = True
    """The projections of experts too."""
    layers: bool = True
    """And the other projections of layers; False: those of experts alone."""

    def __post_init__(self) -> None:
        if self.format not in WEIGHT_FORMATS and (self.format != "mxfp4" or self.layers):
            raise ValueError(
                f"quantization is {self.format!r}; it must be one of {', '.join(WEIGHT_FORMATS)}, or None for none"
            )
        if self.format != "int4" and (self.group_size is not None or not self.symmetric):
            raise ValueError(f"only int4 has groups and zero points; {self.format} has one scale per output")

    @property
    def of_one(self) -> Quantization:
        """Of one weight that is stored so: whether others are too is left out."""
        return dataclasses.replace(self, head=True, experts=True, layers=self.format != "mxfp4")


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    page_size: int = 64
    """Tokens a page holds."""
    num_pages: int | None = None
    """Pages of each cache group; None: as many as the memory left after the weights takes."""
    memory_fraction: float = 0.9
    """Share of the device's memory limit that weights, cache and temporaries may take together."""
    dtype: Literal["auto", "int8", "fp8"] = "auto"
    """As keys and values are stored: in the model's dtype, or in 8 bits with a scale per token and head."""

    def __post_init__(self) -> None:
        if not hasattr(self.page_size, "__index__") or self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size!r}; it must be a power of two")
        if self.dtype not in ("auto", "int8", "fp8"):
            raise ValueError(f"the cache's dtype is {self.dtype!r}; it must be auto, int8 or fp8")
        if self.num_pages is not None:
            at_least_one("num_pages", self.num_pages, ", or None to fill the memory left")
        if not isinstance(self.memory_fraction, (int, float)) or not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {self.memory_fraction!r}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh axes."""

    data: int = 1
    pipe: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"mesh axis '{name}' has size {size}; it must be at least 1")
        for name in ("data", "pipe", "expert"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"mesh axis '{name}' has size {getattr(self, name)}; only 'tensor' may exceed 1 so far"
                )


@dataclass(frozen=True)
class EngineConfig:
    """How requests are batched and how far the host runs ahead of the device."""

    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens one step takes; longer prompts are prefilled in chunks."""
    steps_in_flight: int = 2
    """Steps dispatched before the oldest one's result is read: 2 hides the host, 1 is for tests."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "steps_in_flight"):
            at_least_one(name, getattr(self, name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "a step takes at least a token of every sequence that runs, so raise the first or lower the second"
            )
