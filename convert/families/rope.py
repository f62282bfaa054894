"""RoPE settings of a Hugging Face config, in both dialects, with the defaults of transformers.

Older configs say `rope_theta` and `rope_scaling` (its kind under `type` or `rope_type`), newer ones `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from convert.families.fields import Fields
from jaxinfer.config import RopeConfig


def rope_config(
    fields: Fields, max_position: int, head_dim: int, theta: float = 10_000.0, partial: float | None = None
) -> RopeConfig:
    """The RopeConfig of a config. Raises ValueError for a kind or a setting that is not supported.

    theta, partial: the defaults of `rope_theta` and `partial_rotary_factor`; partial None: the family has none.
    """
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    section = "rope_scaling" if scaling else "rope_parameters"  # where both are, transformers takes rope_scaling
    values = dict(scaling or parameters or {})
    values.setdefault("rope_theta", fields.get("rope_theta", theta))
    if partial is None:
        fields.expect("partial_rotary_factor", 1.0, None)
    else:
        values.setdefault("partial_rotary_factor", fields.number("partial_rotary_factor", partial))
    original = fields.get("original_max_position_embeddings")  # outranks the one inside the section
    if original is not None:
        values["original_max_position_embeddings"] = original
    return section_rope(Fields(values, f"{fields.where}, {section}"), max_position, head_dim, partial is not None)


def section_rope(fields: Fields, max_position: int, head_dim: int, partial: bool = False) -> RopeConfig:
    """The RopeConfig of a section that spells out everything."""
    kind = fields.get("rope_type", fields.get("type", "default"))
    read = fields.choice("rope_type", kind, _KINDS)
    if not partial:
        fields.expect("partial_rotary_factor", 1.0)
    dims = int(head_dim * fields.number("partial_rotary_factor", 1.0))
    if dims % 2 or dims > head_dim:
        raise ValueError(f"{fields.where}: 'partial_rotary_factor' leaves {dims} of {head_dim} dimensions to turn")
    options: dict[str, Any] = {"kind": "longrope" if kind == "su" else kind, **read(fields, max_position)}
    theta = fields.number("rope_theta")
    for name in ("short_factors", "long_factors"):
        if kind in ("longrope", "su") and len(options[name]) != dims // 2:
            raise ValueError(f"{fields.where}: '{name[:-1]}' has {len(options[name])} entries for {dims // 2} pairs")
    fields.finish()
    return RopeConfig(theta=theta, dims=None if dims == head_dim else dims, **options)


def layer_ropes(
    fields: Fields, max_position: int, head_dim: int, theta: float, window_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers that look at everything, and of those with a window: `rope_parameters` with a section for either.

    Older configs say `rope_theta` and `rope_scaling`, which the former take alone, and `rope_local_base_freq`.
    """
    sections: dict[str, Any] = dict(fields.get("rope_parameters") or {})
    full, window = ({**(sections.pop(f"{kind}_attention", None) or {})} for kind in ("full", "sliding"))
    if sections:
        raise ValueError(f"{fields.where}: 'rope_parameters' has {', '.join(sections)} besides a section for each kind")
    full |= fields.get("rope_scaling") or {}
    full.setdefault("rope_theta", fields.get("rope_theta", theta))
    window.setdefault("rope_theta", fields.get("rope_local_base_freq", window_theta))
    return tuple(  # type: ignore[return-value]
        section_rope(Fields(values, f"{fields.where}, rope_parameters"), max_position, head_dim)
        for values in (full, window)
    )


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


def _longrope(fields: Fields, max_position: int) -> dict[str, Any]:
    original = fields.integer("original_max_position_embeddings", max_position)
    factor, attention_factor = fields.get("factor"), fields.get("attention_factor")
    factor = max_position / original if factor is None else fields.number("factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": float(attention_factor),
        "short_factors": tuple(map(float, fields.get("short_factor") or ())),
        "long_factors": tuple(map(float, fields.get("long_factor") or ())),
        "long": max_position > original,
    }


def _dynamic(fields: Fields, max_position: int) -> dict[str, Any]:
    """Its base grows with sequences past `max_position_embeddings`, which we do not take: up to there it is plain."""
    fields.ignore(["original_max_position_embeddings"])
    fields.number("factor")
    return {"kind": "default"}


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What scales cos and sin: 0.1 · ln(factor) + 1 (YaRN, section 3.4), or DeepSeek's ratio of two such terms."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_KINDS: dict[str, Callable[[Fields, int], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "dynamic": _dynamic,
}
