"""Config functions against transformers' own config classes, and what they refuse."""

import dataclasses
import json
import math

import numpy as np
import pytest

from convert import open_checkpoint, register_family
from convert.families import FAMILIES, model_config
from convert.families.llama import LLAMA
from jaxinfer.config import ModelConfig, RopeConfig
from tests import markdown, tiny, tiny_families

BASE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}


def llama(**fields):
    return model_config({"model_type": "llama", **BASE, **fields})


def hugging_face(config, folder):
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


ORIGINAL = ("llama", "mistral", "qwen2", "qwen3")
VARIANTS = {
    **tiny.CASES,
    **{f"{family}, all defaults": {"model_type": family} for family in ORIGINAL},
    "null kv heads": {"model_type": "llama", **BASE, "num_key_value_heads": None},
    "qwen2, explicit head_dim": {"model_type": "qwen2", **BASE, "head_dim": 24},
    "qwen3, null window": {"model_type": "qwen3", **BASE, "use_sliding_window": True, "sliding_window": None},
    "both dialects": {
        "model_type": "llama",
        **BASE,
        "rope_theta": 7.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
    },
    "theta outside": {"model_type": "llama", **BASE, "rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}},
    "original length outside": {
        "model_type": "llama",
        **BASE,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
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


NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}
"""What has no default."""
OTHERS = {
    **tiny_families.CASES,
    **tiny_families.ENCODERS,
    **{
        f"{family}, all defaults": {"model_type": family, **NEEDED.get(family, {})}
        for family in FAMILIES
        if family not in (*ORIGINAL, *tiny_families.SAME_AS)
    },
}
OTHERS = {
    name: config for name, config in OTHERS.items() if config["model_type"] not in tiny_families.NOT_IN_TRANSFORMERS
}


@pytest.mark.parametrize("name", OTHERS)
def test_configs_of_all_families_agree_with_transformers(name, tmp_path):
    """What the goldens do not tell: defaults, and sizes that only large models have."""
    ours, theirs = model_config(OTHERS[name]), hugging_face(OTHERS[name], tmp_path)

    def field(*names):
        return next((getattr(theirs, name) for name in names if getattr(theirs, name, None) is not None), None)

    assert ours.family == theirs.model_type
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.hidden_size, ours.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert ours.num_heads == theirs.num_attention_heads
    mlp = field("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim")
    if ours.family == "dbrx":
        mlp = theirs.ffn_config.ffn_hidden_size
    assert ours.mlp_size == (4 * theirs.hidden_size if mlp is None else mlp)
    max_position = field("max_position_embeddings", "max_seq_len")
    if ours.family == "roberta":
        max_position -= theirs.pad_token_id + 1
    assert ours.max_position == (getattr(theirs, "seq_length", 2048) if max_position is None else max_position)
    eps = field("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    unsaid = 1e-12 if ours.family == "distilbert" else 1e-5  # OPT's is PyTorch's own
    assert ours.norm_eps == (unsaid if eps is None else eps)
    head_dim = field("head_dim") + field("kv_lora_rank") if ours.kv_lora_rank else field("head_dim")
    assert ours.head_dim == (theirs.hidden_size // theirs.num_attention_heads if head_dim is None else head_dim)
    kinds = field("layer_types") or ["sliding_attention"] * ours.num_layers
    window = field("sliding_window")
    if ours.family not in ("gpt_neo", "smollm3"):
        expected = [window if kind == "sliding_attention" else None for kind in kinds]
        assert [ours.window(layer) for layer in range(ours.num_layers)] == expected
    assert list(ours.recurrent_layers) == [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    ends = theirs.eos_token_id
    assert ours.eos_token_ids == (() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,))
    parameters = getattr(theirs, "rope_parameters", None)
    if ours.rope is None or ours.family == "gptj" or parameters is None:
        return
    theirs.standardize_rope_params()  # as its models do once more before they compute frequencies
    parameters = theirs.rope_parameters
    assert_rope_agrees(ours.rope, parameters.get("full_attention", parameters))
    if ours.window_rope is not None:
        assert_rope_agrees(ours.window_rope, parameters["sliding_attention"])
    partial = parameters.get("partial_rotary_factor", 1.0)
    turned = ours.qk_rope_dim if ours.kv_lora_rank else int(ours.head_dim * partial)
    assert (ours.rope.dims or ours.head_dim) == turned


def assert_rope_agrees(ours, theirs):
    assert (ours.kind, ours.theta) == (theirs["rope_type"], theirs["rope_theta"])
    if ours.kind != "default":
        assert ours.factor == theirs.get("factor", ours.factor)
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


def test_dynamic_rope_is_plain_up_to_the_length_that_we_take():
    assert llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}).rope == RopeConfig()


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_takes_the_factors_of_the_longest_sequence(kind):
    scaling = {"type": kind, "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 3, 4]}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config = model_config({"model_type": "phi3", **BASE, **sizes, "rope_scaling": scaling})
    assert config.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    assert [config.for_length(length).rope.long for length in (16, 17, 64)] == [False, True, True]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("fields", "rotary", "head_norm"),
    [
        ({"max_position_embeddings": 4096, "vocab_size": 64000}, True, False),
        ({"model_max_length": 4096, "vocab_size": 64000}, False, False),
        ({"max_position_embeddings": 4096, "model_max_length": 4096, "vocab_size": 125696}, True, True),
        ({"model_max_length": 4096, "vocab_size": 125696, "z_loss_weight": 0}, False, True),
    ],
)
def test_baichuan_s_releases_are_told_apart(fields, rotary, head_norm):
    """7B and 13B of the first and of the second."""
    config = model_config({"model_type": "baichuan", "hidden_size": 64, "num_attention_heads": 8, **fields})
    assert (config.rope is not None, config.alibi_max_bias is None, config.head_norm) == (rotary, rotary, head_norm)
    assert config.max_position == 4096


def test_llama4_s_layers():
    """Of Maverick every other layer has experts; of either release every fourth has no positions, and no chunks."""
    config = model_config({"model_type": "llama4_text", "num_hidden_layers": 8, "interleave_moe_layer_step": 2})
    assert config.dense_layers == (0, 2, 4, 6)
    assert config.no_rope_layers == (3, 7)
    assert config.chunks == (8192, 8192, 8192, None) * 2
    assert [config.scales_queries(layer) for layer in range(8)] == [False, False, False, True] * 2
    assert (config.mlp_size, config.expert_size, config.shared_expert_size) == (16384, 8192, 8192)
    plain = model_config({"model_type": "llama4_text", "attn_temperature_tuning": False, "attention_chunk_size": None})
    assert (plain.query_scaling, plain.chunks, plain.dense_layers) == (None, (), ())
    no_experts = {"moe_layers": [], "interleave_moe_layer_step": 0, "num_local_experts": 0, "num_experts_per_tok": 0}
    dense = model_config({"model_type": "llama4_text", "intermediate_size_mlp": 6144, **no_experts})
    assert (dense.num_experts, dense.shared_expert_size, dense.mlp_size) == (0, 0, 6144)


def test_plain_rope_is_the_default():
    assert llama().rope == RopeConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "gpt9"},
            "architecture 'gpt9' is not supported; supported model types: arctic, .* llama, llama4, ",
        ),
        ({"frobnicate": 1, "beta": 2}, "fields not understood: 'beta', 'frobnicate'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; only 1.0, None is supported"),
        ({"pretraining_tp": 2}, "'pretraining_tp' is 2"),
        ({"hidden_act": "mish"}, "'hidden_act' is 'mish', which is not supported; supported: silu"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral'.*supported: default, linear, llama3, y"),
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
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "'short_factor' has 1 entries for 4 pairs",
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 0.4}, "'partial_rotary_factor' leaves 3 of 8 dimensions"),
        ({"model_type": "phi", "qk_layernorm": True}, "'qk_layernorm' is True; only False"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "'layer_types' has 1 entries for 4 layers"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 4}, "all layers are recurrent"),
        ({"model_type": "minimax_text_01", "attn_type_list": [0, 2, 0, 1]}, "'attn_type_list' has 2; it is 0 for"),
        ({"model_type": "minimax_text_01", "shared_intermediate_size": 8}, "'shared_intermediate_size' is 8; only 0"),
        ({"model_type": "minimax", "rotary_dim": 3}, "'partial_rotary_factor' leaves 3 of 8 dimensions"),
        ({"model_type": "qwen3_next", "linear_num_value_heads": 3}, "3 value heads .* no multiple of their 16 key"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "'no_rope_layers' has 1 entries for 4 layers"),
        (
            {"model_type": "cohere2", "layer_types": ["sliding_attention"] * 4, "sliding_window": None},
            "has sliding lay",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ({"model_type": "gemma3_text", "rope_parameters": {"chunked_attention": {}}}, "has chunked_attention besides"),
        ({"model_type": "olmo3", "rope_parameters": {"full_attention": {"rope_type": "spin"}}}, "'spin', which is not"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' is True"),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "'apply_residual_connection_post"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "is 2 without 'new_decoder_architecture'"),
        ({"model_type": "gptj", "attn_config": {}}, "fields not understood: 'attn_config', 'hidden_size'"),
        ({"model_type": "qwen2", "attention_bias": True}, "fields not understood: 'attention_bias'"),
        ({"model_type": "baichuan", "num_key_value_heads": None, "vocab_size": 99}, "neither Baichuan's 64000 nor Bai"),
        ({"model_type": "arctic", "parallel_attn_mlp_res": True, "use_residual": False}, "'use_residual' is False"),
        ({"model_type": "llama4_text", "no_rope_layers": [1]}, "'no_rope_layers' has 1 entries for 4 layers"),
        (
            {"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 4, "attention_chunk_size": None},
            "'layer_types' has chunked layers, but 'attention_chunk_size' says none",
        ),
        (
            {"model_type": "llama4_text", "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "before their norm is not supp",
        ),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "'llama_4_scaling_beta' needs 'original_max_position_embeddings'",
        ),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "llama"}},
            "text_config: 'model_type' is 'llama', wh",
        ),
        ({"model_type": "llama4", "text_config": {"frob": 1}}, "text_config: fields not understood: 'frob'"),
        ({"model_type": "bert", "is_decoder": True}, "'is_decoder' is True; only False is supported"),
        (
            {"model_type": "bert", "position_embedding_type": "relative_key"},
            "'position_embedding_type' is 'relative",
        ),
        ({"model_type": "roberta", "pad_token_id": None}, r"'pad_token_id' is \[\]; positions are counted from it"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        llama(**fields)


def test_a_registered_family_loads_and_its_name_is_its_own(no_new_families, tmp_path):
    """The example of docs/models.md: Llama with names of its own, gate and up in one tensor, capped logits."""
    [example] = markdown.blocks(markdown.ROOT / "docs" / "models.md", "python")
    exec(example, {})

    tensors = tiny.weights("llama")
    tensors["tokens.table"] = tensors.pop("model.embed_tokens.weight")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp."
        parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{prefix}both"] = np.concatenate(parts)
    tiny.write_config({**tiny.CASES["llama"], "model_type": "house", "logit_cap": 5}, tmp_path / "house")
    tiny.write_safetensors(tensors, tmp_path / "house")
    house, llama = open_checkpoint(tmp_path / "house"), open_checkpoint(tiny.write_checkpoint("llama", tmp_path / "l"))
    assert house.config == dataclasses.replace(llama.config, family="house", logit_soft_cap=5.0)
    for path in llama.sources:
        np.testing.assert_array_equal(house.read(path, np.float32), llama.read(path, np.float32))
    with pytest.raises(ValueError, match=r"there is a family 'house' already; give yours, and its config"):
        register_family("house", LLAMA.config, LLAMA.table)
