"""What families share: the config fields that every decoder has, and the rows of tables of tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from convert import transforms
from convert.families.fields import Fields, token_ids
from convert.families.rope import rope_config
from convert.families.table import Source, Table
from convert.transforms import Transform

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Hugging Face's `hidden_act` → ours."""

BASE: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Defaults of most config classes of transformers."""

NAMES: Mapping[str, str] = {"norm_eps": "rms_norm_eps"}
"""What a field is called where it is not called as in `BASE`."""


def norm_rows(path: str, name: str) -> dict[str, Source]:
    """The scale and the bias of a norm."""
    return {
        f"{path}.scale": Source((f"{name}.weight",), transforms.whole),
        f"{path}.bias": Source((f"{name}.bias",), transforms.whole),
    }


def linear_rows(
    path: str, names: tuple[str, ...], transform: Transform, bias: Transform = transforms.whole
) -> dict[str, Source]:
    """A projection and its bias, from one or several that are fused."""
    return {
        path: Source(tuple(f"{name}.weight" for name in names), transform),
        f"{path}_bias": Source(tuple(f"{name}.bias" for name in names), bias),
    }


LLAMA_TABLE: Table = {
    "embed.weight": Source(("model.embed_tokens.weight",), transforms.whole),
    **norm_rows("layers.{}.attention_norm", "model.layers.{}.input_layernorm"),
    **linear_rows(
        "layers.{}.attention.qkv",
        tuple(f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkv"),
        transforms.fused_qkv,
        transforms.fused_qkv_bias,
    ),
    "layers.{}.attention.q_norm.scale": Source(("model.layers.{}.self_attn.q_norm.weight",), transforms.whole),
    "layers.{}.attention.k_norm.scale": Source(("model.layers.{}.self_attn.k_norm.weight",), transforms.whole),
    **linear_rows("layers.{}.attention.out", ("model.layers.{}.self_attn.o_proj",), transforms.attention_out),
    **norm_rows("layers.{}.mlp_norm", "model.layers.{}.post_attention_layernorm"),
    **linear_rows(
        "layers.{}.mlp.gate_up",
        ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
        transforms.fused_gate_up,
        transforms.fused_gate_up_bias,
    ),
    **linear_rows("layers.{}.mlp.up", ("model.layers.{}.mlp.up_proj",), transforms.transposed),
    **linear_rows("layers.{}.mlp.down", ("model.layers.{}.mlp.down_proj",), transforms.transposed),
    **norm_rows("final_norm", "model.norm"),
    "head.weight": Source(("lm_head.weight",), transforms.transposed),
    "head.bias": Source(("lm_head.bias",), transforms.whole),
}

OUTPUT_NORMS: Table = {
    **norm_rows("layers.{}.attention_output_norm", "model.layers.{}.post_attention_layernorm"),
    **norm_rows("layers.{}.mlp_output_norm", "model.layers.{}.post_feedforward_layernorm"),
}
"""Rows of the families that normalise what attention and the MLP give, under the names of most."""


def common_fields(
    fields: Fields, defaults: Mapping[str, Any], names: Mapping[str, str] | None = None, rope: bool = True
) -> dict[str, Any]:
    """The ModelConfig arguments that every decoder has.

    defaults: those of its transformers config class, over `BASE`. names: what it calls a field, over `NAMES`.
    rope: whether its positions are rotary.
    """
    defaults, names = {**BASE, **defaults}, {**NAMES, **(names or {})}

    def integer(key: str) -> int:
        return fields.integer(names.get(key, key), defaults[key])

    hidden_size, num_heads = integer("hidden_size"), integer("num_attention_heads")
    max_position = integer("max_position_embeddings")
    kv_name, mlp_name, act_name = (
        names.get(key, key) for key in ("num_key_value_heads", "intermediate_size", "hidden_act")
    )
    kv_heads = fields.get(kv_name, defaults["num_key_value_heads"])
    mlp_size = fields.get(mlp_name, defaults["intermediate_size"])
    act = fields.get(act_name, defaults["hidden_act"])
    bos = token_ids(fields, "bos_token_id", defaults["bos_token_id"])
    head_dim = _head_dim(fields, hidden_size, num_heads, defaults["head_dim"], rope)
    turned = None
    if rope:
        turned = rope_config(
            fields,
            max_position,
            head_dim,
            defaults["rope_theta"],
            defaults["partial_rotary_factor"],
            defaults["original_max_position_embeddings"],
            names,
        )
    return {
        "vocab_size": integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads if kv_heads is None else fields.integer(kv_name, kv_heads),
        "head_dim": head_dim,
        "mlp_size": 4 * hidden_size if mlp_size is None else fields.integer(mlp_name, mlp_size),
        "max_position": max_position,
        "rope": turned,
        "norm_eps": fields.number(names["norm_eps"], defaults["norm_eps"]),
        "activation": fields.choice(act_name, act, ACTIVATIONS),
        "tied_head": fields.boolean("tie_word_embeddings", defaults["tie_word_embeddings"]),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": token_ids(fields, "eos_token_id", defaults["eos_token_id"]),
    }


def layer_windows(
    fields: Fields, num_layers: int, slides: Callable[[int], bool] | None = None, default: int | None = 4096
) -> tuple[int | None, ...]:
    """Per-layer windows, if `use_sliding_window` says that there are any: of the layers that `layer_types` says.

    slides: which they are if it is absent; as a rule those from `max_window_layers` on. default: of `sliding_window`.
    """
    used = fields.boolean("use_sliding_window", False)
    window = fields.get("sliding_window", default)
    window = fields.integer("sliding_window", window) if used and window is not None else None
    first = fields.count("max_window_layers", 28)
    sliding = sliding_layers(fields, num_layers)
    if sliding is None:
        slides = slides or (lambda layer: layer >= first)
        sliding = [window is not None and slides(layer) for layer in range(num_layers)]
    if any(sliding) and window is None:
        raise ValueError(
            f"{fields.where}: 'layer_types' has sliding layers, but 'use_sliding_window' or 'sliding_window' says none"
        )
    return windows_of(sliding, window)


def pattern_windows(
    fields: Fields, num_layers: int, window: int | None, pattern: int, fixed: bool = False
) -> tuple[int | None, ...]:
    """Per-layer windows: `layer_types` if given, else every `sliding_window_pattern`-th layer looks at everything.

    window, pattern: what `sliding_window` and `sliding_window_pattern` are by default; fixed: the latter always.
    """
    name = "sliding_window_pattern"
    if fields.get("layer_types") is not None:
        fields.ignore([name, f"_{name}"])
    else:
        if fixed:
            fields.expect(name, pattern, None)
        elif fields.get(name) is not None:
            pattern = fields.integer(name)
        fields.expect(f"_{name}", pattern, None)  # transformers writes it beside layer_types, and does not read it
    return layer_kinds_windows(fields, num_layers, window, pattern)


def layer_kinds_windows(
    fields: Fields, num_layers: int, default: int | None, pattern: int | None = None
) -> tuple[int | None, ...]:
    """`sliding_window` of the layers that `layer_types` says have it; of all if it is absent, but each `pattern`-th."""
    window = fields.get("sliding_window", default)
    window = None if window is None else fields.integer("sliding_window", window)
    sliding = sliding_layers(fields, num_layers)
    if sliding is None:
        every = range(1, num_layers + 1)
        sliding = [window is not None and (pattern is None or layer % pattern != 0) for layer in every]
    if any(sliding) and window is None:
        raise ValueError(f"{fields.where}: 'layer_types' has sliding layers, but 'sliding_window' says none")
    return windows_of(sliding, window)


def every_layer_window(fields: Fields, num_layers: int, default: int | None) -> tuple[int | None, ...]:
    """`sliding_window` of all layers, or of none where it is null."""
    window = fields.get("sliding_window", default)
    return () if window is None else (fields.integer("sliding_window", window),) * num_layers


def sliding_layers(fields: Fields, num_layers: int) -> list[bool] | None:
    """Which layers have a window by `layer_types`; None if it is null or absent."""
    kinds = fields.per_layer("layer_types", num_layers)
    return kinds and [fields.choice("layer_types", kind, _LAYER_KINDS) for kind in kinds]


def windows_of(sliding: list[bool], window: int | None) -> tuple[int | None, ...]:
    """Empty if no layer has one."""
    return tuple(window if layer else None for layer in sliding) if any(sliding) else ()


_LAYER_KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}


def _head_dim(fields: Fields, hidden_size: int, num_heads: int, default: int | None, rope: bool) -> int:
    head_dim = fields.get("head_dim", default)
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"{fields.where}: 'hidden_size' {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = hidden_size // num_heads if head_dim is None else fields.integer("head_dim", head_dim)
    if rope and head_dim % 2:
        raise ValueError(f"{fields.where}: head_dim is {head_dim}; RoPE turns pairs, so it must be even")
    return head_dim
