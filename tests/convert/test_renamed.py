"""Families that transformers cannot run, or not alone: what they hold is another family's, under other names."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from convert import open_checkpoint
from tests import tiny, tiny_families


def internlm2(tensors):
    """Queries, keys and values of each kv head together."""
    names = {
        "model.embed_tokens.": "model.tok_embeddings.",
        "lm_head.": "output.",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    tensors = renamed(tensors, names)
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        parts = [tensors.pop(f"{prefix}self_attn.{name}_proj.weight").reshape(2, -1, 8, 64) for name in "qkv"]
        tensors[f"{prefix}attention.wqkv.weight"] = np.concatenate(parts, axis=1).reshape(-1, 64)
    return tensors


def chatglm(tensors):
    """Queries, keys and values one after the other."""
    names = {
        "model.embed_tokens.": "transformer.embedding.word_embeddings.",
        "lm_head.": "transformer.output_layer.",
        "model.norm.": "transformer.encoder.final_layernorm.",
        "model.layers.": "transformer.encoder.layers.",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    tensors = renamed(tensors, names)
    for layer in range(2):
        prefix = f"transformer.encoder.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{prefix}self_attn.{name}_proj.{kind}") for name in "qkv"]
            tensors[f"{prefix}self_attention.query_key_value.{kind}"] = np.concatenate(parts)
    return {**tensors, "transformer.rotary_pos_emb.inv_freq": np.zeros(2, np.float32)}


def beside_images(tensors, tower="vision_tower"):
    """Beside a vision tower."""
    others = {f"{tower}.x.weight": np.zeros(3, np.float32), "multi_modal_projector.y.weight": np.zeros(3, np.float32)}
    return {**{f"language_model.{name}": tensor for name, tensor in tensors.items()}, **others}


def llama4(tensors):
    return beside_images(tensors, "vision_model")


def minimax(tensors):
    """The decays, which follow from the config, beside the weights."""
    return {**tensors, "model.layers.0.self_attn.slope_rate": np.zeros((4, 1, 1), np.float32)}


def renamed(tensors, names):
    changed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        changed[name] = tensor
    return changed


def with_head(tensors):
    """As saved by the class that predicts masked words, in the days of TensorFlow's names."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    named = {f"roberta.{name}": tensor for name, tensor in renamed(tensors, names).items()}
    return {
        **named,
        "roberta.embeddings.position_ids": np.arange(128)[None],
        "roberta.pooler.dense.weight": np.ones((32, 32), np.float32),
        "lm_head.bias": np.zeros(99, np.float32),
    }


MINIMAX = {
    **{name: value for name, value in tiny_families.CASES["minimax"].items() if "factor" not in name},
    "attn_type_list": [0, 0, 1],
    "layernorm_full_attention_alpha": 1.5,
    "layernorm_full_attention_beta": 0.7,
    "layernorm_linear_attention_alpha": 0.8,
    "layernorm_linear_attention_beta": 1.2,
    "layernorm_mlp_alpha": 1.3,
    "layernorm_mlp_beta": 0.9,
    "postnorm": True,
    "rotary_dim": 12,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
}
del MINIMAX["layer_types"]
GLM, LLAMA = tiny_families.CASES["glm"], tiny.CASES["llama"]
FAMILIES = {
    "internlm2": (
        "llama",
        {**LLAMA, "bias": False, "rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        internlm2,
    ),
    "internlm3": ("llama", {**LLAMA, "head_dim": 8, "qkv_bias": False, "bias": False}, dict),
    "chatglm": (
        "glm",
        {
            **{name: GLM[name] for name in ("hidden_size", "num_attention_heads", "torch_dtype", "eos_token_id")},
            "bos_token_id": 1,
            "padded_vocab_size": 99,
            "ffn_hidden_size": 48,
            "num_layers": 2,
            "seq_length": 128,
            "kv_channels": 8,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "layernorm_epsilon": 1.5625e-07,
            "add_qkv_bias": True,
            "rope_ratio": 1,
        },
        chatglm,
    ),
    "minimax_m1": ("minimax", MINIMAX, minimax),
    "minimax_text_01": ("minimax", MINIMAX, minimax),
    "gemma3": (
        "gemma3_text",
        {
            "text_config": tiny_families.CASES["gemma3_text"],
            "vision_config": {"hidden_size": 4},
            "eos_token_id": 2,
            "torch_dtype": "float32",
        },
        beside_images,
    ),
    "llama4": (
        "llama4_text",
        {
            "text_config": tiny_families.CASES["llama4_text"],
            "vision_config": {},
            "boi_token_index": 7,
            "eoi_token_index": 8,
        },
        llama4,
    ),
    "mistral3": (
        "ministral3",
        {
            "text_config": tiny_families.CASES["ministral3"],
            "vision_config": {},
            "image_token_index": 10,
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
        },
        beside_images,
    ),
    "camembert": ("roberta", tiny_families.ENCODERS["roberta"], with_head),
    "xlm-roberta": ("roberta", {**tiny_families.ENCODERS["roberta"], "position_embedding_type": "absolute"}, dict),
}


def test_these_are_the_families_that_are_said_to_be_anothers():
    assert {name: base for name, (base, _, _) in FAMILIES.items()} == tiny_families.SAME_AS


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_config_and_the_same_arrays(family, tmp_path):
    base, config, convert = FAMILIES[family]
    tiny.write_config({**config, "model_type": family}, tmp_path / "ours")
    tiny.write_safetensors(convert(tiny.weights(base)), tmp_path / "ours")
    ours, theirs = open_checkpoint(tmp_path / "ours"), open_checkpoint(tiny.write_checkpoint(base, tmp_path / "base"))
    assert dataclasses.replace(ours.config, family=theirs.config.family) == theirs.config
    assert list(ours.sources) == list(theirs.sources)
    for path in theirs.sources:
        np.testing.assert_array_equal(ours.read(path, np.float32), theirs.read(path, np.float32))
