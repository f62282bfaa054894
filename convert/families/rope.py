"""RoPE settings of a Hugging Face config, in both dialects, with the defaults of transformers.

Older configs say `rope_theta` and `rope_scaling` (its kind under `type` or `rope_type`), newer ones `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from convert.families.fields import Fields
from jaxinfer.config import RopeConfig


def rope_config(
    fields: Fields,
    max_position: int,
    head_dim: int,
    theta: float = 10_000.0,
    partial: float | None = None,
    original: int | None = None,
    names: Mapping[str, str] | None = None,
) -> RopeConfig:
    """The RopeConfig of a config. Raises ValueError for a kind or a setting that is not supported.

    theta, partial, original: the defaults of `rope_theta`, `partial_rotary_factor` and, beside the section,
    `original_max_position_embeddings`; partial None: the family has none. names: what it calls the first two.
    """
    values, section = _section(fields)
    for name, default in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if default is None:
            fields.expect(name, 1.0, None)
            continue
        _settle(fields, values, section, name, default, (names or {}).get(name))
        if name in (names or {}):
            fields.expect(name, values[name])  # again, under the usual name
    trained = "original_max_position_embeddings"
    outside = fields.get(trained, original)  # outranks the one inside the section
    if outside is not None:
        if values.get(trained, outside) not in (outside, None):
            raise ValueError(
                f"{fields.where}: '{trained}' is {outside}{'' if trained in fields else ' by default'}, but "
                f"{values[trained]} in '{section}'; give it one value"
            )
        values[trained] = outside
    return section_rope(Fields(values, f"{fields.where}, {section}"), max_position, head_dim, partial is not None)


def _section(fields: Fields) -> tuple[dict[str, Any], str]:
    """The settings, and what they are called. Raises ValueError if they are there in both dialects and differ."""
    scaling, parameters = (fields.mapping(name) for name in ("rope_scaling", "rope_parameters"))
    beside = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor") if name in fields}
    if scaling and parameters and {**beside, **_one_kind(scaling)} != {**beside, **_one_kind(parameters)}:
        raise ValueError(f"{fields.where}: 'rope_scaling' and 'rope_parameters' say different things; keep one of them")
    return (scaling, "rope_scaling") if scaling else (parameters, "rope_parameters")


def _one_kind(values: Mapping[str, Any]) -> dict[str, Any]:
    """A section whose kind is under `rope_type` only."""
    values = dict(values)
    kind = values.pop("type", "default")
    return {"rope_type": kind, **values}


def _settle(
    fields: Fields, values: dict[str, Any], section: str, name: str, default: float, beside: str | None = None
) -> None:
    """Have a setting in the section that may be beside it instead. Raises ValueError if it is in both and differs.

    beside: what it is called there.
    """
    beside = beside or name
    if beside in fields and values.setdefault(name, fields.get(beside)) != fields.get(beside):
        raise ValueError(
            f"{fields.where}: '{beside}' is {fields.get(beside)!r}, but '{name}' in '{section}' is {values[name]!r}; "
            "keep one of them"
        )
    values.setdefault(name, default)


def section_rope(fields: Fields, max_position: int, head_dim: int, partial: bool = False) -> RopeConfig:
    """The RopeConfig of a section that spells out everything."""
    old = fields.get("type", "default")
    kind = fields.get("rope_type", old)
    read = fields.choice("rope_type", kind, _KINDS)
    if "type" in fields and _KINDS.get(old) is not read:
        raise ValueError(f"{fields.where}: 'type' is {old!r}, but 'rope_type' is {kind!r}; keep one of them")
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
    sections = fields.mapping("rope_parameters")
    each = Fields({kind: sections.pop(kind, None) for kind in _KINDS_OF_LAYERS}, f"{fields.where}, rope_parameters")
    full, window = (each.mapping(kind) for kind in _KINDS_OF_LAYERS)
    if sections:
        raise ValueError(f"{fields.where}: 'rope_parameters' has {', '.join(sections)} besides a section for each kind")
    scaling = fields.mapping("rope_scaling")
    if full and scaling and {**full, **_one_kind(scaling)} != _one_kind(full):
        raise ValueError(f"{fields.where}: 'rope_scaling' and 'rope_parameters' say different things; keep one of them")
    full |= scaling
    _settle(fields, full, "full_attention", "rope_theta", theta)
    _settle(fields, window, "sliding_attention", "rope_theta", window_theta, "rope_local_base_freq")
    return tuple(  # type: ignore[return-value]
        section_rope(Fields(values, f"{fields.where}, rope_parameters"), max_position, head_dim)
        for values in (full, window)
    )


_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


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
