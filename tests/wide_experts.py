"""Tiny checkpoints with experts whose projections every format fits: groups of 32, on two devices as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests import tiny, tiny_families
from tests.convert import quantized_files

_WIDE = {"hidden_size": 64, "head_dim": 16}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64},
}


def config(case: str, **fields: Any) -> dict[str, Any]:
    """config.json of the wide sister of a case of `tiny_families`."""
    return {**tiny_families.CASES[case], **_WIDE, **_SIZES[case], **fields}


def tensors(case: str, **fields: Any) -> dict[str, np.ndarray]:
    """Its float32 tensors."""
    with mock.patch.dict(tiny_families.CASES, {case: config(case, **fields)}):
        return tiny_families.weights(case)


def write(case: str, folder: Path, **fields: Any) -> Path:
    """The checkpoint in floats; returns its folder."""
    tiny.write_config(config(case, **fields), folder)
    tiny.write_safetensors(tensors(case, **fields), folder)
    return folder


def write_mxfp4(folder: Path, **fields: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """A gpt-oss whose experts are in MXFP4, as the original is; and the float32 tensors that it means."""
    rng, stored, meant = np.random.default_rng(0), {}, {}
    for name, array in tensors("gpt_oss", **fields).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = array.shape
            parts, meant[name] = quantized_files.mxfp4(experts, outputs, inputs, rng, exponents=(121, 124))
            stored |= {name + part: value for part, value in parts.items()}
        else:
            stored[name] = meant[name] = array
    values = config("gpt_oss", quantization_config={"quant_method": "mxfp4"}, **fields)
    tiny.write_config(values, folder)
    tiny.write_safetensors(stored, folder)
    return folder, meant
