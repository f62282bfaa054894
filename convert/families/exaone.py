"""EXAONE 4: norms after each half, and windows; with them, layers that look at everything have no RoPE."""

from __future__ import annotations

from convert.families.decoder import LLAMA_TABLE, OUTPUT_NORMS, common_fields, pattern_windows
from convert.families.fields import Fields
from convert.families.table import Family
from jaxinfer.config import ModelConfig

_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def _config(fields: Fields) -> ModelConfig:
    common = common_fields(fields, _DEFAULTS)
    windows = pattern_windows(fields, common["num_layers"], 4096, 4)
    has_window = fields.get("sliding_window", 4096) is not None
    no_rope = [layer for layer in range(common["num_layers"]) if has_window and not (windows and windows[layer])]
    return ModelConfig(
        family="exaone4",
        **common,
        windows=windows,
        no_rope_layers=tuple(no_rope),
        norm_placement="output",
        qk_norm=True,
    )


EXAONE4 = Family(_config, {**LLAMA_TABLE, **OUTPUT_NORMS})
