"""RoPE settings of a Hugging Face config, in both dialects, with the defaults of transformers.

Older configs say `rope_theta` and `rope_scaling` (its kind under `type` or `rope_type`), newer ones `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from convert.families.fields import Fields
from jaxinfer.config import RopeConfig


def rope_config(fields: Fields, max_position: int) -> RopeConfig:
    """The RopeConfig of a config. Raises ValueError for a kind or a setting that is not supported."""
    fields.expect("partial_rotary_factor", 1.0, None)
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    section = "rope_scaling" if scaling else "rope_parameters"  # where both are, transformers takes rope_scaling
    theta = fields.get("rope_theta", 10_000.0)
    original = fields.get("original_max_position_embeddings")  # outranks the one inside the section
    values = dict(scaling or parameters or {})
    values.setdefault("rope_theta", theta)
    if original is not None:
        values["original_max_position_embeddings"] = original
    inner = Fields(values, f"{fields.where}, {section}")
    kind = inner.get("rope_type", inner.get("type", "default"))
    read = inner.choice("rope_type", kind, _KINDS)
    inner.expect("partial_rotary_factor", 1.0)
    rope = RopeConfig(theta=inner.number("rope_theta"), kind=kind, **read(inner, max_position))
    inner.finish()
    return rope


def _default(fields: Fields, max_position: int) -> dict[str, Any]:
    fields.ignore(["original_max_position_embeddings"])
    return {}


def _linear(fields: Fields, max_position: int) -> dict[str, Any]:
    fields.ignore(["original_max_position_embeddings"])
    return {"factor": fields.number("factor")}


def _llama3(fields: Fields, max_position: int) -> dict[str, Any]:
    return {
        "factor": fields.number("factor"),
        "low_freq_factor": fields.number("low_freq_factor"),
        "high_freq_factor": fields.number("high_freq_factor"),
        "original_max_position": fields.integer("original_max_position_embeddings", max_position),
    }


def _yarn(fields: Fields, max_position: int) -> dict[str, Any]:
    original = fields.integer("original_max_position_embeddings", max_position)
    factor = max_position / original if fields.get("factor", 0) is None else fields.number("factor")
    mscale, mscale_all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return {
        "factor": factor,
        "original_max_position": original,
        "beta_fast": float(fields.get("beta_fast") or 32.0),
        "beta_slow": float(fields.get("beta_slow") or 1.0),
        "attention_factor": float(attention_factor),
        "truncate": fields.boolean("truncate", True),
    }


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What scales cos and sin: 0.1 · ln(factor) + 1 (YaRN, section 3.4), or DeepSeek's ratio of two such terms."""

    def term(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


_KINDS: dict[str, Callable[[Fields, int], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
