"""What a model is, spelled out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are stretched past the trained length.

    `linear`: positions divided by `factor` (Chen et al. 2023). `llama3`: low frequencies divided by `factor`, with a
    smooth band between `low_freq_factor` and `high_freq_factor` (Llama 3.1). `yarn`: Peng et al. 2023, with
    `attention_factor` scaling cos and sin. `longrope` (Ding et al. 2024): each frequency is divided by a factor of its
    own, one set of them for a model that goes past the trained length and one for a model that does not.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    """Trained length in tokens, before stretching; llama3, yarn and longrope need it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    """yarn: whether the bounds of the correction range are rounded to whole dimensions."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope: of each pair of dimensions, up to the trained length and past it."""
    long: bool = True
    """longrope: whether sequences may pass the trained length, so that all take the long factors."""
    dims: int | None = None
    """The first dimensions of a head, which alone are turned; None: all."""


@dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position p, against attention that fades over long contexts (Nakanishi 2025): times
    1 + beta · ln(1 + floor((p + offset) / length))."""

    beta: float
    length: int
    """Tokens until they start to."""
    offset: int = 0
    """1: positions are counted from one (Llama 4)."""
    without_rope: bool = False
    """Only in layers without RoPE (Llama 4)."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose cache keeps the same tokens, so that they share pages and a block table."""

    window: int | None
    """Tokens a layer of this group looks back, itself included; None: all."""
    layers: tuple[int, ...]
    chunk: int | None = None
    """Tokens of a chunk, before which its tokens do not look; None: there are no chunks."""

    def first_seen(self, position: int) -> int:
        """The first position that a query at `position` sees; a later query sees none before it."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position - position % self.chunk)

    def most_pages(self, num_tokens: int, page_size: int, step: int) -> int:
        """Most pages a sequence holds at once on its way to `num_tokens`, computed `step` tokens at a time at most."""
        pages = -(-num_tokens // page_size)
        spans = [span for span in (self.window, self.chunk) if span is not None]
        return min([pages, *(-(-(span - 1 + step) // page_size) + 1 for span in spans)])


@dataclass(frozen=True)
class ModelConfig:
    """A model, spelled out: every difference between families that changes the result is a field here."""

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
    rope: RopeConfig | None
    """None: positions are not rotary."""
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"] = "silu"
    gated_mlp: bool = True
    """activation(gate(x)) · up(x); else activation(up(x))."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    """A norm of the model's kind on q and k, before RoPE (Qwen3)."""
    qk_norm_span: Literal["head", "each_head", "all_heads"] = "head"
    """Over head_dim, with one scale for all heads or one for each (Cohere); or over all heads together (OLMo 2)."""
    qk_norm_with_rope: bool = False
    """An RMSNorm over head_dim without a scale, on q and k of the layers with RoPE (Llama 4). Before RoPE or after it
    is the same, as RoPE changes no length."""
    qkv_clip: float | None = None
    """q, k and v are clipped to ± this (OLMo, MPT), after their norms if they have any."""

    num_experts: int = 0
    """Of the layers whose tokens are routed to experts; 0: no layer does that."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Of the hidden layer of one expert."""
    shared_expert_size: int = 0
    """Of one more that every token takes; 0: none."""
    shared_expert_gate: bool = True
    """It is multiplied by the sigmoid of a projection (Qwen2-MoE)."""
    dense_residual_size: int = 0
    """Of the hidden layer of an MLP that layers with experts have besides, with a norm of its own (Arctic): it takes
    what attention leaves, and the experts take what attention took; 0: there is none."""
    expert_bias: bool = False
    """The router and the experts' projections have biases (gpt-oss)."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP of `mlp_size`, in a model with experts."""
    router_normalise: bool = True
    """The weights of a token's experts sum to one; else they are their shares among all experts."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_scale: float = 1.0
    """The weights are multiplied by it."""
    router_scales_input: bool = False
    """A weight multiplies what its expert takes, not what it gives (Llama 4)."""
    router_correction_bias: bool = False
    """Added to the scores to choose by, not to the weights (DeepSeek-V3)."""
    router_groups: int = 0
    """Experts are in so many groups, of which only the best are chosen from (DeepSeek); 0: in none."""
    router_top_groups: int = 0
    router_group_score: Literal["max", "top2"] = "max"
    """What makes a group good: its best expert, or the sum of its best two."""

    kv_lora_rank: int = 0
    """Multi-head latent attention (DeepSeek-V2): the keys and values of all heads are made of so many numbers a token,
    the latent, which the cache holds beside the part of the key that RoPE turns: there is one kv head, of head_dim
    qk_rope_dim + kv_lora_rank. 0: heads have keys and values of their own."""
    q_lora_rank: int = 0
    """Queries are made of so many numbers; 0: of the embedding."""
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    """Of a head's query and key, the part that RoPE leaves alone, and the part that it turns."""
    v_head_dim: int = 0

    attention_gate: bool = False
    """What a query head attends to is multiplied by the sigmoid of a projection as wide (Qwen3-Next)."""
    recurrent_layers: tuple[int, ...] = ()
    """Layers that keep, in place of keys and values, a state per sequence, whose size does not grow with it."""
    recurrence: Literal["gated_delta", "lightning"] = "gated_delta"
    """What those layers do: `models/recurrent.py`, `models/lightning.py`."""
    recurrent_key_heads: int = 0
    recurrent_value_heads: int = 0
    """Of the recurrent layers; several value heads, each with a state of its own, may share a key head."""
    recurrent_key_dim: int = 0
    recurrent_value_dim: int = 0
    """A head's state is [recurrent_key_dim, recurrent_value_dim]."""
    conv_width: int = 0
    """Inputs that the convolution over queries, keys and values takes, its own included (Gated DeltaNet); 0: none."""

    norm: Literal["rms", "layer"] = "rms"
    norm_scale: bool = True
    norm_bias: bool = False
    norm_offset: float = 0.0
    """Added to the stored scale (1 for Gemma and Nemotron)."""
    norm_placement: Literal["pre", "post", "output", "sandwich", "entry"] = "pre"
    """Of each half of a layer, f: x + f(norm(x)), norm(x + f(x)), x + norm(f(x)), x + norm(f(norm(x))), or, of y =
    norm(x), y + f(y)."""
    parallel_residual: bool = False
    """x + attention(norm(x)) + mlp(norm(x)) (GPT-J), rather than one after the other."""
    shared_norm: bool = False
    """Both halves of a parallel layer take the same norm."""
    embed_norm: bool = False
    """A norm after the embedding (BLOOM, BERT)."""
    final_norm: bool = True

    windows: tuple[int | None, ...] = ()
    """Per layer: tokens it looks back, itself included; None: all. Empty: all layers look at everything."""
    chunks: tuple[int | None, ...] = ()
    """Per layer: positions come in chunks of so many, and a token looks no further back than to the start of its own
    (Llama 4); None: there are no chunks. Empty: in no layer."""
    window_rope: RopeConfig | None = None
    """Of the layers with a window, where it differs (Gemma 3)."""
    no_rope_layers: tuple[int, ...] = ()
    """Layers without RoPE, in a model that has it (SmolLM3)."""
    query_scaling: QueryScaling | None = None
    learned_positions: int = 0
    """Rows of a table of positions, added to the embedding (GPT-2); 0: none."""
    position_offset: int = 0
    """The row of position 0 (2 for OPT)."""
    token_types: int = 0
    """Rows of a table of which the first is added to every embedding (BERT); 0: there is none."""
    bidirectional: bool = False
    """Every token sees all of its sequence, also what follows: an encoder (BERT)."""
    alibi_max_bias: float | None = None
    """ALiBi (Press et al. 2022): the largest exponent of the heads' slopes, 8 as a rule; None: none."""
    alibi_scale: float = 1.0
    """The slopes are multiplied by it (Falcon)."""
    attention_scale: float | None = None
    """Scores are q · k times this; None: head_dim ** -0.5."""
    sinks: bool = False
    """Each query head has a learned score for attending to nothing (gpt-oss)."""
    attention_soft_cap: float | None = None
    """Scores become cap · tanh(score / cap) (Gemma 2)."""
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """What each half of a layer adds to the residual is multiplied by it (Granite)."""
    skip_scale: float = 1.0
    """What it is added to is multiplied by it (MiniMax)."""
    recurrent_scales: tuple[float, float] | None = None
    mlp_scales: tuple[float, float] | None = None
    """(skip_scale, residual_scale) of recurrent layers in place of attention's, and of MLPs; None: as attention's."""
    logit_scale: float = 1.0
    head_norm: bool = False
    """Each row of the head is divided by its length (Baichuan 2)."""
    embedding_size: int | None = None
    """Of the embedding and the head, where projections join it to hidden_size (OPT 350m)."""
    tied_head: bool = False
    headless: bool = False
    """It embeds text and generates none: an encoder, or a decoder that was saved without its head."""
    vocab_padding: int = 0
    """Rows past `vocab_size`, there only so that a mesh divides the vocabulary; never sampled, never counted."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        for name, sizes in (("windows", self.windows), ("chunks", self.chunks)):
            if sizes and len(sizes) != self.num_layers:
                raise ValueError(f"{len(sizes)} {name} for {self.num_layers} layers: give one per layer, or none")
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm is for layers with parallel_residual: others need two norms")
        if self.bidirectional and not self.headless:
            raise ValueError("what sees the tokens that follow cannot predict them: bidirectional goes with headless")
        back = self.windows or self.chunks or self.recurrent_layers or self.alibi_max_bias is not None
        if self.bidirectional and back:
            raise ValueError("windows, chunks, states and ALiBi look back only: they do not go with bidirectional")
        if self.kv_lora_rank and self.head_dim != self.qk_rope_dim + self.kv_lora_rank:
            raise ValueError(f"head_dim is {self.head_dim}; of latent attention it is qk_rope_dim + kv_lora_rank")
        if self.recurrent_layers and set(self.recurrent_layers) >= set(range(self.num_layers)):
            raise ValueError("all layers are recurrent; at least one must have keys and values")
        if self.recurrent_layers and (
            not self.recurrent_key_heads or self.recurrent_value_heads % self.recurrent_key_heads
        ):
            raise ValueError(
                f"{self.recurrent_value_heads} value heads of recurrent layers are no multiple of their "
                f"{self.recurrent_key_heads} key heads"
            )
        if self.recurrent_layers and self.recurrence == "gated_delta" and self.conv_width < 2:
            raise ValueError(f"conv_width is {self.conv_width}; a convolution takes at least 2 inputs")
        if not self.norm_scale and self.norm == "rms":
            raise ValueError("norm_scale False goes with norm 'layer'")
        if self.num_experts and not (0 < self.experts_per_token <= self.num_experts and self.expert_size):
            raise ValueError(
                f"{self.experts_per_token} of {self.num_experts} experts of size {self.expert_size}: a token takes at "
                "least one and at most all of them, and they have a size"
            )
        if self.router_groups:
            size, rest = divmod(self.num_experts, self.router_groups)
            chosen = self.router_top_groups * size
            few = size < 2 and self.router_group_score == "top2"
            if rest or few or not 0 < self.experts_per_token <= chosen <= self.num_experts:
                raise ValueError(
                    f"{self.experts_per_token} experts of the best {self.router_top_groups} of {self.router_groups} "
                    f"groups of {self.num_experts} experts: groups are alike, and those chosen hold enough experts"
                )
        if self.dense_residual_size and (self.norm_placement != "pre" or self.parallel_residual):
            raise ValueError("dense_residual_size goes with norm_placement 'pre' and without parallel_residual only")
        if self.parallel_residual and self.norm_placement != "pre":
            raise ValueError(f"parallel_residual goes with norm_placement 'pre' only, not {self.norm_placement!r}")

    @property
    def q_per_kv(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding as stored: the vocabulary and its padding."""
        return self.vocab_size + self.vocab_padding

    @property
    def embed_size(self) -> int:
        """Size of a row of the embedding."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def chunk(self, layer: int) -> int | None:
        return self.chunks[layer] if self.chunks else None

    def routes(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return bool(self.num_experts) and layer not in self.dense_layers

    def is_recurrent(self, layer: int) -> bool:
        """Whether the layer keeps a state, and no keys and values."""
        return layer in self.recurrent_layers

    def rope_of(self, layer: int) -> RopeConfig | None:
        """What turns the queries and keys of a layer; None: nothing does."""
        if layer in self.no_rope_layers:
            return None
        return self.rope if self.window_rope is None or self.window(layer) is None else self.window_rope

    def scales_queries(self, layer: int) -> bool:
        """Whether `query_scaling` is for this layer."""
        scaling = self.query_scaling
        return scaling is not None and not (scaling.without_rope and self.rope_of(layer) is not None)

    @property
    def shares_kv(self) -> bool:
        """Whether the cache holds one vector a token, which is the key and the value of all heads."""
        return self.kv_lora_rank > 0

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers with keys and values by retention, in order of first use."""
        layers: dict[tuple[int | None, int | None], list[int]] = {}
        for layer in range(self.num_layers):
            if self.is_recurrent(layer):
                continue
            layers.setdefault((self.window(layer), self.chunk(layer)), []).append(layer)
        return tuple(CacheGroup(window, tuple(members), chunk) for (window, chunk), members in layers.items())

    def kv_elements_per_token(self) -> int:
        """Cache elements one token takes over all layers; none without a head, to generate."""
        per_layer = (1 if self.shares_kv else 2) * self.num_kv_heads * self.head_dim
        return 0 if self.headless else (self.num_layers - len(self.recurrent_layers)) * per_layer

    def of_half(self, layer: int, half: Literal["attention", "mlp"]) -> ModelConfig:
        """The config as one half of a layer takes it, with its own `skip_scale` and `residual_scale`."""
        recurrent = self.recurrent_scales if self.is_recurrent(layer) else None
        scales = self.mlp_scales if half == "mlp" else recurrent
        if scales is None:
            return self
        return dataclasses.replace(self, skip_scale=scales[0], residual_scale=scales[1])

    @property
    def recurrent_channels(self) -> int:
        """What a recurrent layer makes of its input for one key head: query, key, values."""
        return 2 * self.recurrent_key_dim + self.recurrent_value_dim * self.recurrent_value_heads // max(
            1, self.recurrent_key_heads
        )

    @property
    def state_bytes(self) -> int:
        """What recurrent layers keep of one sequence, in float32 whatever the model's dtype."""
        c = self
        memory = c.recurrent_value_heads * c.recurrent_key_dim * c.recurrent_value_dim
        inputs = c.recurrent_key_heads * max(0, c.conv_width - 1) * c.recurrent_channels
        return 4 * len(c.recurrent_layers) * (memory + inputs)

    def for_length(self, max_model_len: int) -> ModelConfig:
        """The config for sequences of so many tokens at most: longrope has other factors up to the trained length."""
        rope = self.rope
        if rope is None or rope.kind != "longrope" or rope.original_max_position is None:
            return self
        return dataclasses.replace(
            self, rope=dataclasses.replace(rope, long=max_model_len > rope.original_max_position)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown fields in the model config: {', '.join(unknown)}; written by a newer version?")
        values = _tuples(values)
        for name, record in (("rope", RopeConfig), ("window_rope", RopeConfig), ("query_scaling", QueryScaling)):
            if values.get(name) is not None:
                values[name] = record(**_tuples(values[name]))
        return cls(**values)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
