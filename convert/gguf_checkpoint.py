"""GGUF models: config from the metadata, and llama.cpp's tensor names, per architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert import transforms
from convert.families.fields import Fields
from convert.families.rope import yarn_attention_factor
from convert.families.table import Source, Table, match
from convert.gguf_header import GgufHeader, read_header
from convert.gguf_reader import GgufReader
from jaxinfer.config import ModelConfig, RopeConfig

_TABLE: Table = {
    "embed.weight": Source(("token_embd.weight",), transforms.whole),
    "layers.{}.attention_norm.scale": Source(("blk.{}.attn_norm.weight",), transforms.whole),
    "layers.{}.attention.qkv": Source(tuple(f"blk.{{}}.attn_{name}.weight" for name in "qkv"), transforms.fused_qkv),
    "layers.{}.attention.qkv_bias": Source(
        tuple(f"blk.{{}}.attn_{name}.bias" for name in "qkv"), transforms.fused_qkv_bias
    ),
    "layers.{}.attention.q_norm.scale": Source(("blk.{}.attn_q_norm.weight",), transforms.whole),
    "layers.{}.attention.k_norm.scale": Source(("blk.{}.attn_k_norm.weight",), transforms.whole),
    "layers.{}.attention.out": Source(("blk.{}.attn_output.weight",), transforms.attention_out),
    "layers.{}.attention.out_bias": Source(("blk.{}.attn_output.bias",), transforms.whole),
    "layers.{}.mlp_norm.scale": Source(("blk.{}.ffn_norm.weight",), transforms.whole),
    "layers.{}.mlp.gate_up": Source(("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"), transforms.fused_gate_up),
    "layers.{}.mlp.gate_up_bias": Source(("blk.{}.ffn_gate.bias", "blk.{}.ffn_up.bias"), transforms.fused_gate_up_bias),
    "layers.{}.mlp.down": Source(("blk.{}.ffn_down.weight",), transforms.transposed),
    "layers.{}.mlp.down_bias": Source(("blk.{}.ffn_down.bias",), transforms.whole),
    "final_norm.scale": Source(("output_norm.weight",), transforms.whole),
    "head.weight": Source(("output.weight",), transforms.transposed),
}
_QKV = ("layers.{}.attention.qkv", "layers.{}.attention.qkv_bias")


@dataclass(frozen=True)
class _Architecture:
    table: Table
    qk_norm: bool = False


_ARCHITECTURES = {
    # Mistral calls itself llama too. The rows of q and k are in the order of llama.cpp's interleaved RoPE.
    "llama": _Architecture(
        {**_TABLE, **{p: Source(_TABLE[p].names, transforms.interleaved_qk(_TABLE[p].transform)) for p in _QKV}}
    ),
    "qwen2": _Architecture(_TABLE),
    "qwen3": _Architecture(_TABLE, qk_norm=True),
}
"""`general.architecture` → how to read it."""

_ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: Path) -> tuple[GgufReader, ModelConfig, dict[str, Source]]:
    """Tensors, config and sources of a GGUF file. Raises ValueError, naming it, for what is not supported."""
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{path}: GGUF architecture '{architecture}' is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    if header.metadata.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {header.metadata['split.count']} parts; merge them with gguf-split first")
    reader = GgufReader(path, header)
    config = _config(header, architecture, reader, str(path))
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    ignored = (_ROPE_FACTORS.replace(".", r"\."),)  # its meaning is in the config by now
    return reader, config, match(config, _ARCHITECTURES[architecture].table, shapes, ignored, str(path))


def _config(header: GgufHeader, architecture: str, reader: GgufReader, where: str) -> ModelConfig:
    prefix = f"{architecture}."
    metadata = header.metadata
    fields = Fields(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)},
        f"{where}, {architecture}",
    )
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    fields.expect("attention.value_length", head_dim)
    fields.expect("rope.dimension_count", head_dim)
    fields.expect("attention.causal", True)
    for name in ("expert_count", "expert_used_count", "attention.sliding_window"):
        fields.expect(name, 0)
    fields.ignore(["vocab_size", "tensor_data_layout"])  # the embedding's rows tell the first
    if "token_embd.weight" not in reader.tensors:
        raise ValueError(f"{where}: tensor token_embd.weight is missing")
    max_position = fields.integer("context_length")
    config = ModelConfig(
        family=architecture,
        vocab_size=reader.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_size=fields.integer("feed_forward_length"),
        max_position=max_position,
        rope=_rope(fields, max_position, head_dim, reader),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in reader.tensors,
        out_bias="blk.0.attn_output.bias" in reader.tensors,
        mlp_bias="blk.0.ffn_down.bias" in reader.tensors,
        qk_norm=_ARCHITECTURES[architecture].qk_norm,
        tied_head="output.weight" not in reader.tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_ids(metadata),
    )
    fields.finish()
    return config


def _end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _rope(fields: Fields, max_position: int, head_dim: int, reader: GgufReader) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10_000.0)
    kinds = {"none": "default", "linear": "linear", "yarn": "yarn"}
    kind = fields.choice("rope.scaling.type", fields.get("rope.scaling.type", "none"), kinds)
    fields.ignore(["rope.scaling.finetuned"])
    original = fields.integer("rope.scaling.original_context_length", max_position)
    factor = fields.number("rope.scaling.factor", 1.0)
    # llama.cpp lets these overrule YaRN's own formulas; only what means "as the formulas say" is accepted.
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        fields.expect(name, 1.0)
    beta_fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    if _ROPE_FACTORS in reader.tensors:
        if kind != "default":
            raise ValueError(f"{fields.where}: both {_ROPE_FACTORS} and rope.scaling.type '{kind}'; one is supported")
        return _llama3(reader.read(_ROPE_FACTORS, 0, head_dim // 2), theta, head_dim, fields.where)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            theta,
            "yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=yarn_attention_factor(factor),
        )
    return RopeConfig(theta)


def _llama3(divisors: np.ndarray, theta: float, head_dim: int, where: str) -> RopeConfig:
    """The Llama 3.1 settings behind llama.cpp's table of what each frequency [head_dim / 2] is divided by.

    Only the ratios of the trained length to `low_freq_factor` and `high_freq_factor` show in it, so the first is taken
    as 1 and the second as 4, which all Llama 3 models have; the length follows from the band between them.
    Raises ValueError if the settings found do not give the table back.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor = float(divisors.max())
    low, high = 1.0, 4.0
    band = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))
    if factor > 1 and band.any():
        smooth = (1 / divisors[band] - 1 / factor) / (1 - 1 / factor)
        original = round(float(np.mean((smooth * (high - low) + low) * wavelengths[band])))
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-5):
            return RopeConfig(
                theta,
                "llama3",
                factor=factor,
                original_max_position=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
    raise ValueError(
        f"{where}: {_ROPE_FACTORS} is not a table of Llama 3.1's scaling with low_freq_factor {low} and "
        f"high_freq_factor {high}; use the safetensors checkpoint, whose config spells the scaling out"
    )
