"""Tiny random Hugging Face checkpoints, one per family and rope kind: numpy only, the same bytes everywhere.

Weights are uniform, which numpy's PCG64 keeps stable between versions, and large: logits have a standard deviation
above 1 and attention is far from uniform, so that a wrong activation or mask shows. Norms and biases are random too.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests import tiny_families

_SHAPE: dict[str, Any] = {
    "vocab_size": 251,  # odd, so that any mesh pads it
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LLAMA = {**_SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MISTRAL = {**_SHAPE, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16}
_QWEN2 = {**_SHAPE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
_QWEN3 = {**_SHAPE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}

CASES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "llama_biases": {
        **_LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 10,
        "rope_theta": 500.0,
        "rope_scaling": None,
        "pretraining_tp": 1,
    },
    "llama_one_kv_head": {**_LLAMA, "num_key_value_heads": 1, "num_hidden_layers": 2, "rope_theta": 10000.0},
    "llama_llama3": {
        **_LLAMA,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_linear": {
        **_LLAMA,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama_yarn": {
        **_LLAMA,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    },
    "mistral_window": {**_MISTRAL, "sliding_window": 24, "rope_theta": 10000.0},
    "mistral_full": {
        **_MISTRAL,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen2": {
        **_QWEN2,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 16,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
    },
    "qwen2_windows": {
        **_QWEN2,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
        "rope_theta": 10000.0,
    },
    "qwen3": {**_QWEN3, "attention_bias": False, "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen3_yarn": {
        **_QWEN3,
        "attention_bias": True,
        "max_position_embeddings": 128,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    },
}
"""Name → the checkpoint's config.json. Tensor parallel 1, 2, 4 and 8 fit them all."""

ALL_CASES = {**CASES, **tiny_families.CASES}
"""And those of the other families, which are smaller."""

EVERY_CASE = {**ALL_CASES, **tiny_families.ENCODERS}
"""And the encoders."""


def weights(name: str) -> dict[str, np.ndarray]:
    """The float32 tensors of a case under their Hugging Face names, in file order."""
    if name not in CASES:
        return tiny_families.weights(name)
    c = CASES[name]
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))

    def uniform(*shape: int, std: float) -> np.ndarray:
        return (rng.random(shape) * 2 - 1).astype(np.float32) * np.float32(std * 3**0.5)

    def linear(prefix: str, rows: int, columns: int, *, bias: bool, gain: float = 1.0) -> None:
        tensors[f"{prefix}.weight"] = uniform(rows, columns, std=gain * columns**-0.5)
        if bias:
            tensors[f"{prefix}.bias"] = uniform(rows, std=0.3)

    def norm(prefix: str, size: int) -> None:
        tensors[f"{prefix}.weight"] = (0.5 + rng.random(size)).astype(np.float32)

    hidden, mlp = c["hidden_size"], c["intermediate_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    family, attention_bias = c["model_type"], c.get("attention_bias", False)
    qkv_bias, mlp_bias = attention_bias or family == "qwen2", c.get("mlp_bias", False)
    tensors: dict[str, np.ndarray] = {"model.embed_tokens.weight": uniform(c["vocab_size"], hidden, std=0.25)}
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        linear(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden, bias=qkv_bias, gain=1.4)
        linear(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden, bias=qkv_bias, gain=1.4)
        linear(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden, bias=qkv_bias)
        if family == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, bias=attention_bias)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        linear(f"{prefix}.mlp.gate_proj", mlp, hidden, bias=mlp_bias, gain=1.4)
        linear(f"{prefix}.mlp.up_proj", mlp, hidden, bias=mlp_bias, gain=1.4)
        linear(f"{prefix}.mlp.down_proj", hidden, mlp, bias=mlp_bias)
    norm("model.norm", hidden)
    if not c["tie_word_embeddings"]:
        linear("lm_head", c["vocab_size"], hidden, bias=False, gain=2.0)
    return tensors


def write_checkpoint(name: str, folder: Path, *, shards: int = 1, dtype: str = "float32") -> Path:
    """Write case `name` into `folder` as transformers would, in `shards` safetensors files; returns the folder."""
    config = next(cases[name] for cases in (CASES, ALL_CASES, EVERY_CASE) if name in cases)  # tests patch the first two
    write_config({**config, "torch_dtype": dtype}, folder)
    target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {key: value.astype(target) for key, value in weights(name).items()}
    write_safetensors(tensors, folder, shards=shards)
    return folder


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Write `config.json`, making the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_safetensors(tensors: dict[str, np.ndarray], folder: Path, *, shards: int = 1) -> None:
    """Write `model.safetensors`, or `shards` files with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        members = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({key: tensors[key] for key in members}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sha256(tensors: dict[str, np.ndarray]) -> str:
    """Hash of names and bytes: tells whether goldens were made from these very weights."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(tensors[key]).tobytes())
    return digest.hexdigest()
