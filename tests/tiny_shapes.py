"""What the config.json of most tiny checkpoints has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 99,  # odd, so that any mesh pads it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
GPT: dict[str, Any] = {
    **{name: value for name, value in SHAPE.items() if "_embeddings" not in name and not name.startswith("num_")},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
for _name in ("hidden_size", "intermediate_size"):
    del GPT[_name]


def case(model_type: str, architecture: str, shape: Mapping[str, Any] = SHAPE, **fields: Any) -> dict[str, Any]:
    return {**shape, "model_type": model_type, "architectures": [f"{architecture}ForCausalLM"], **fields}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SHAPE.items() if name not in names}


SLIDING = ["sliding_attention", "full_attention"]
