"""Model families, each a config function and a table of tensor names: `FAMILIES[model_type]`.

A new family is a module with a `Family` in it and a line in the registry here, or, outside this package, a call of
`register_family`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from convert.families.arctic import ARCTIC
from convert.families.baichuan import BAICHUAN
from convert.families.bert import BERT, DISTILBERT, ROBERTA
from convert.families.bloom import BLOOM, FALCON, MPT
from convert.families.chatglm import CHATGLM
from convert.families.cohere import COHERE, COHERE2
from convert.families.dbrx import DBRX
from convert.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from convert.families.ernie import ERNIE4_5
from convert.families.exaone import EXAONE4
from convert.families.fields import Fields, token_ids
from convert.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES
from convert.families.general import skip_general
from convert.families.glm import GLM, GLM4
from convert.families.gpt2 import GPT2, GPT_BIGCODE, GPT_NEO
from convert.families.gptj import GPT_NEOX, GPTJ
from convert.families.granite import GRANITE
from convert.families.internlm import INTERNLM2, INTERNLM3
from convert.families.llama import LLAMA
from convert.families.llama4 import LLAMA4, LLAMA4_WITH_IMAGES
from convert.families.minimax import MINIMAX, MINIMAX_ORIGINAL
from convert.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3
from convert.families.moe import GPT_OSS, GRANITE_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from convert.families.nemotron import NEMOTRON
from convert.families.olmo import OLMO, OLMO2, OLMO3
from convert.families.opt import OPT
from convert.families.phi import PHI, PHI3
from convert.families.qwen import QWEN2, QWEN3
from convert.families.qwen3_next import QWEN3_NEXT
from convert.families.smollm import SMOLLM3
from convert.families.stablelm import STABLELM
from convert.families.starcoder import STARCODER2
from convert.families.table import Family, Source, Table
from jaxinfer.config import ModelConfig

__all__ = ["FAMILIES", "Fields", "Source", "Table", "family_of", "model_config", "register_family"]

FAMILIES: dict[str, Family] = {
    "arctic": ARCTIC,
    "baichuan": BAICHUAN,
    "bert": BERT,
    "bloom": BLOOM,
    "camembert": ROBERTA,
    "chatglm": CHATGLM,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "dbrx": DBRX,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "distilbert": DISTILBERT,
    "ernie4_5": ERNIE4_5,
    "exaone4": EXAONE4,
    "falcon": FALCON,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3_WITH_IMAGES,
    "gemma3_text": GEMMA3,
    "glm": GLM,
    "glm4": GLM4,
    "gpt2": GPT2,
    "gpt_bigcode": GPT_BIGCODE,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "gptj": GPTJ,
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "internlm2": INTERNLM2,
    "internlm3": INTERNLM3,
    "llama": LLAMA,
    "llama4": LLAMA4_WITH_IMAGES,
    "llama4_text": LLAMA4,
    "minimax": MINIMAX,
    "minimax_m1": MINIMAX_ORIGINAL,
    "minimax_text_01": MINIMAX_ORIGINAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "mistral": MISTRAL,
    "mistral3": MISTRAL3,
    "mixtral": MIXTRAL,
    "mpt": MPT,
    "nemotron": NEMOTRON,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "opt": OPT,
    "phi": PHI,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "roberta": ROBERTA,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
    "xlm-roberta": ROBERTA,
}
"""Hugging Face's `model_type` → the family."""


def register_family(name: str, config_fn: Callable[[Fields], ModelConfig], tensor_table: Table) -> None:
    """Add a family of your own: checkpoints whose config.json has this `model_type` load from then on.

    config_fn: reads the fields of config.json; one that it neither reads nor ignores is an error. tensor_table: our
    path, with `{}` for the layer's number, → the tensors that fill it and how. Raises ValueError if the name is taken.
    """
    if name in FAMILIES:
        raise ValueError(f"there is a family '{name}' already; give yours, and its config.json, another model_type")
    FAMILIES[name] = Family(config_fn, tensor_table)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json. Raises ValueError, listing the supported ones, if there is none."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"{where}: architecture '{model_type}' is not supported; supported model types: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def model_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json, with the semantics of transformers 5.

    The end ids of generation_config.json, where it has any, replace those of config.json, as in transformers.
    Raises ValueError naming the field for a value that is not supported and for a field that is not understood.
    """
    family = family_of(config, where)
    fields = Fields(config, where)
    skip_general(fields)
    result = family.config(fields)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not (result.windows or result.chunks or result.recurrent_layers):
        fields.ignore(["layer_types"] if all(kind == "full_attention" for kind in kinds) else [])  # as they all are
    fields.finish()
    ends = token_ids(Fields(generation or {}, "generation_config.json"), "eos_token_id")
    return dataclasses.replace(result, eos_token_ids=ends) if ends else result
