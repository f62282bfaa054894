"""Config functions against transformers' own config classes, and what they refuse."""

import json
import math

import pytest

from convert.families import FAMILIES, model_config
from jaxinfer.config import RopeConfig
from tests import tiny

BASE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}


def llama(**fields):
    return model_config({"model_type": "llama", **BASE, **fields})


def hugging_face(config, folder):
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


VARIANTS = {
    **tiny.CASES,
    **{f"{family}, all defaults": {"model_type": family} for family in FAMILIES},
    "null kv heads": {"model_type": "llama", **BASE, "num_key_value_heads": None},
    "qwen2, explicit head_dim": {"model_type": "qwen2", **BASE, "head_dim": 24},
    "qwen3, null window": {"model_type": "qwen3", **BASE, "use_sliding_window": True, "sliding_window": None},
    "both dialects": {
        "model_type": "llama",
        **BASE,
        "rope_theta": 7.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
    },
    "theta outside": {"model_type": "llama", **BASE, "rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}},
    "original length outside": {
        "model_type": "llama",
        **BASE,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    },
    "original length absent": {"model_type": "llama", **BASE, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_configs_agree_with_transformers(name, tmp_path):
    ours, theirs = model_config(VARIANTS[name]), hugging_face(VARIANTS[name], tmp_path)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.family == theirs.model_type
    assert (ours.vocab_size, ours.hidden_size, ours.mlp_size) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.intermediate_size,
    )
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )
    assert (ours.max_position, ours.norm_eps, ours.activation) == (
        theirs.max_position_embeddings,
        theirs.rms_norm_eps,
        theirs.hidden_act,
    )
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    bias = getattr(theirs, "attention_bias", False)
    assert (ours.qkv_bias, ours.out_bias) == (bias or ours.family == "qwen2", bias)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.qk_norm == (ours.family == "qwen3")
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    window = getattr(theirs, "sliding_window", None)
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [ours.window(layer) for layer in range(ours.num_layers)] == expected
    theirs.standardize_rope_params()  # as its models do once more before they compute frequencies
    assert_rope_agrees(ours.rope, theirs.rope_parameters)


def assert_rope_agrees(ours, theirs):
    assert (ours.kind, ours.theta) == (theirs["rope_type"], theirs["rope_theta"])
    if ours.kind != "default":
        assert ours.factor == theirs["factor"]
    if ours.kind in ("llama3", "yarn"):
        assert ours.original_max_position == theirs["original_max_position_embeddings"]
    if ours.kind == "llama3":
        assert ours.low_freq_factor == theirs["low_freq_factor"]
        assert ours.high_freq_factor == theirs["high_freq_factor"]
    if ours.kind == "yarn":
        assert ours.beta_fast == theirs.get("beta_fast", 32.0)
        assert ours.beta_slow == theirs.get("beta_slow", 1.0)
        assert ours.truncate == theirs.get("truncate", True)


def yarn(**fields):
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, **fields}
    return llama(max_position_embeddings=128, rope_scaling=scaling).rope


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"factor": 0.5}, 1.0),
        ({"attention_factor": 0.75}, 0.75),
        ({"mscale": 2.0}, 0.1 * math.log(8) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
        ({"factor": None}, 0.1 * math.log(4) + 1),
    ],
)
def test_yarn_attention_factor_is_stored_as_the_final_number(fields, expected):
    assert yarn(**fields).attention_factor == pytest.approx(expected, abs=1e-12)


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    assert yarn(factor=None).factor == 4.0


def test_generation_config_ends_replace_those_of_the_config():
    config = {"model_type": "llama", **BASE, "eos_token_id": [5, 6]}
    assert model_config(config).eos_token_ids == (5, 6)
    assert model_config(config, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert model_config(config, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert model_config(config, {"temperature": 0.6}).eos_token_ids == (5, 6)


def test_plain_rope_is_the_default():
    assert llama().rope == RopeConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt9"}, "architecture 'gpt9' is not supported; supported model types: llama, mistral, qwen2"),
        ({"frobnicate": 1, "beta": 2}, "fields not understood: 'beta', 'frobnicate'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; only 1.0, None is supported"),
        ({"pretraining_tp": 2}, "'pretraining_tp' is 2"),
        ({"hidden_act": "mish"}, "'hidden_act' is 'mish', which is not supported; supported: silu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*supported: default, linear, llama3, y"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "warp": 3}}, "rope_scaling: fields not understood: 'warp'"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is None; it must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "'partial_rotary_factor' is 0.25",
        ),
        ({"rope_theta": None}, "'rope_theta' is None"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' is {'bits': 4}; only None is supported"),
        ({"num_hidden_layers": "4"}, "'num_hidden_layers' is '4'; it must be a positive integer"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1; it must be true or false"),
        ({"head_dim": 7}, "head_dim is 7; RoPE turns pairs"),
        ({"num_attention_heads": 7}, "'hidden_size' 64 is not a multiple of 7 heads"),
        ({"num_key_value_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'"),
        ({"model_type": "mistral", "attention_bias": True}, "'attention_bias' is True; only False"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "'layer_types' has sliding layers, but"),
        (
            {"model_type": "qwen2", "layer_types": ["linear_attention"] * 4},
            "'linear_attention', which is not supported",
        ),
        ({"model_type": "qwen2", "attention_bias": True}, "fields not understood: 'attention_bias'"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        llama(**fields)
