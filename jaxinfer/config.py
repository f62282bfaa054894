"""What a model is and how it is run: frozen records, standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are stretched past the trained length.

    `linear`: positions divided by `factor` (Chen et al. 2023). `llama3`: low frequencies divided by `factor`, with a
    smooth band between `low_freq_factor` and `high_freq_factor` (Llama 3.1). `yarn`: Peng et al. 2023, with
    `attention_factor` scaling cos and sin.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    """Trained length in tokens, before stretching; llama3 and yarn need it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    """yarn: whether the bounds of the correction range are rounded to whole dimensions."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose cache keeps the same tokens, so that they share pages and a block table."""

    window: int | None
    """Tokens a layer of this group looks back, itself included; None: all."""
    layers: tuple[int, ...]

    def most_pages(self, num_tokens: int, page_size: int, chunk: int) -> int:
        """Most pages a sequence holds at once on its way to `num_tokens`, computed `chunk` tokens at a time at most."""
        pages = -(-num_tokens // page_size)
        return pages if self.window is None else min(pages, -(-(self.window - 1 + chunk) // page_size) + 1)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, spelled out: every difference between families that changes the result is a field here."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_position: int
    """Longest sequence in tokens the model was made for."""
    rope: RopeConfig
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on q and k, before RoPE (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer: tokens it looks back, itself included; None: all. Empty: all layers look at everything."""
    tied_head: bool = False
    vocab_padding: int = 0
    """Rows past `vocab_size`, there only so that a mesh divides the vocabulary; never sampled, never counted."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers: give one per layer, or none")

    @property
    def q_per_kv(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding as stored: the vocabulary and its padding."""
        return self.vocab_size + self.vocab_padding

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers by retention, in order of first use."""
        layers: dict[int | None, list[int]] = {}
        for layer in range(self.num_layers):
            layers.setdefault(self.window(layer), []).append(layer)
        return tuple(CacheGroup(window, tuple(members)) for window, members in layers.items())

    def kv_elements_per_token(self) -> int:
        """Cache elements one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown fields in the model config: {', '.join(unknown)}; written by a newer version?")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(**{**values, "rope": RopeConfig(**values["rope"])})


type WeightFormat = Literal["int8", "int4", "fp8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("int8", "int4", "fp8")


@dataclass(frozen=True)
class Quantization:
    """How the projections are stored, instead of in the model's dtype."""

    format: WeightFormat
    group_size: int | None = None
    """int4: inputs that share a scale; None: the largest that the model's projections allow."""
    symmetric: bool = True
    """int4: without zero points."""

    def __post_init__(self) -> None:
        if self.format not in WEIGHT_FORMATS:
            raise ValueError(
                f"quantization is {self.format!r}; it must be one of {', '.join(WEIGHT_FORMATS)}, or None for none"
            )
        if self.format != "int4" and (self.group_size is not None or not self.symmetric):
            raise ValueError(f"only int4 has groups and zero points; {self.format} has one scale per output")


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
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size}; it must be a power of two")
        if self.dtype not in ("auto", "int8", "fp8"):
            raise ValueError(f"the cache's dtype is {self.dtype!r}; it must be auto, int8 or fp8")
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(f"num_pages is {self.num_pages}; it must be at least 1, or None to fill the memory left")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")


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
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: "
                "a decode step takes one token of every running sequence, so raise the first or lower the second"
            )
