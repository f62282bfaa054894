"""Model families, each a config function and a table of tensor names: `FAMILIES[model_type]`.

A new family is a module with a `Family` in it and a line in the registry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.fields import Fields, token_ids
from convert.families.llama import LLAMA
from convert.families.mistral import MISTRAL
from convert.families.qwen import QWEN2, QWEN3
from convert.families.table import Family
from jaxinfer.config import ModelConfig

__all__ = ["FAMILIES", "family_of", "model_config"]

FAMILIES: dict[str, Family] = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
"""Hugging Face's `model_type` → the family."""

_NO_EFFECT = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    attn_implementation auto_map dtype id2label initializer_range label2id model_type name_or_path num_labels
    output_attentions output_hidden_states pad_token_id problem_type resid_pdrop return_dict sep_token_id
    task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config transformers_version
    unk_token_id unsloth_fixed unsloth_version use_cache use_return_dict
"""
"""Fields that describe files, training or return types: never what the model computes at inference."""

_GENERATION = """
    begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
"""Sampling defaults that older transformers wrote into config.json; a request's own parameters replace them."""


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
    fields.ignore(_NO_EFFECT.split())
    fields.ignore(_GENERATION.split())
    fields.expect("quantization_config", None)
    fields.expect("is_encoder_decoder", False)
    fields.expect("is_decoder", False, True)
    fields.expect("add_cross_attention", False)
    fields.expect("cross_attention_hidden_size", None)
    fields.expect("tie_encoder_decoder", False)
    fields.expect("chunk_size_feed_forward", 0)
    fields.expect("pruned_heads", {})
    result = family.config(fields)
    fields.finish()
    ends = token_ids(Fields(generation or {}, "generation_config.json"), "eos_token_id")
    return dataclasses.replace(result, eos_token_ids=ends) if ends else result
