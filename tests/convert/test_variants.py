"""What config.json says in ways of a family's own, in fields of released checkpoints, and twice."""

import pytest

from convert.families import model_config
from convert.families.decoder import ACTIVATIONS

BASE = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4}
OTHER_NAMES = {"dbrx": {}, "gptj": {}, "gpt_neo": {"num_layers": 4}}
WINDOW = {"use_sliding_window": True, "sliding_window": 12, "num_key_value_heads": 2}


def config(model_type, **fields):
    base = OTHER_NAMES.get(model_type, BASE)
    return model_config({"model_type": model_type, **base, **fields})


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("qwen2", {**WINDOW, "max_window_layers": 1}, (None, 12, 12, 12)),
        ("qwen2", {**WINDOW, "max_window_layers": 4}, ()),
        ("qwen2_moe", {**WINDOW, "max_window_layers": 1}, (12, None, None, None)),
        ("qwen2_moe", {**WINDOW, "max_window_layers": 9}, (12, None, 12, None)),
        ("qwen3_moe", {**WINDOW, "max_window_layers": 1}, (12, 12, 12, 12)),
        ("qwen3_moe", {"sliding_window": 12}, ()),
        ("qwen3_moe", {**WINDOW, "sliding_window": None, "layer_types": ["full_attention"] * 4}, ()),
        ("smollm3", {**WINDOW, "no_rope_layers": [1, 0, 1, 0]}, (None, 12, None, 12)),
        ("smollm3", {"use_sliding_window": True}, ()),
        ("olmo3", {"sliding_window": 12, "sliding_window_pattern": 4}, (12, 12, 12, None)),
        ("gemma2", {"sliding_window": 12, "sliding_window_size": 12}, (12, None, 12, None)),
        ("cohere2", {"sliding_window": 12, "sliding_window_pattern": 2}, (12, None, 12, None)),
    ],
)
def test_windows(model_type, fields, windows):
    """As transformers 5 has them: each family has a rule of its own for layers that `layer_types` does not name."""
    assert config(model_type, **fields).windows == windows


RELEASED = [
    ("qwen2", {"num_key_value_heads": 2}, {"use_mrope": False}, {"use_mrope": True}),
    ("phi3", {}, {"full_attn_mod": 1, "interpolate_factor": 1}, {"full_attn_mod": 2}),
    ("phi3", {}, {"lm_head_bias": False, "mlp_bias": False}, {"lm_head_bias": True}),
    ("gemma2", {"sliding_window": 8}, {"sliding_window_size": 8}, {"sliding_window_size": 4}),
    ("falcon", {}, *({"apply_residual_connection_post_layernorm": value} for value in (False, True))),
    ("falcon", {"ffn_hidden_size": 256}, {"ff_factor": 4}, {"ff_factor": 2}),
    ("starcoder2", {"norm_epsilon": 1e-6}, {"layer_norm_epsilon": 1e-6}, {"layer_norm_epsilon": 1e-5}),
    ("starcoder2", {}, {"attention_softmax_in_fp32": True, "scale_attn_weights": True}, {"scale_attn_weights": False}),
    ("nemotron", {"head_dim": 16}, {"kv_channels": 16}, {"kv_channels": 8}),
    ("opt", {"do_layer_norm_before": False}, {"_remove_final_layer_norm": False}, {"_remove_final_layer_norm": 0}),
]
"""What counts, fields that released checkpoints have besides, which change nothing, and other values of those."""


@pytest.mark.parametrize(("model_type", "fields", "besides", "others"), RELEASED)
def test_fields_of_released_checkpoints(model_type, fields, besides, others):
    assert config(model_type, **fields, **besides) == config(model_type, **fields)
    with pytest.raises(ValueError, match=next(iter(others))):
        config(model_type, **fields, **others)


@pytest.mark.parametrize("field", ["cache_implementation", "hidden_dropout_prob", "finetuning_task", "bad_words_ids"])
def test_fields_of_any_family_that_have_no_effect(field):
    assert config("llama", **{field: "whatever"}) == config("llama")


def test_families_without_windows_may_say_that_all_layers_look_at_everything():
    full = ["full_attention"] * 4
    assert config("llama", layer_types=full) == config("llama")
    with pytest.raises(ValueError, match="fields not understood: 'layer_types'"):
        config("llama", layer_types=[*full[:3], "sliding_attention"])
    with pytest.raises(ValueError, match="fields not understood: 'layer_types'"):
        config("starcoder2", layer_types=full, sliding_window=12)


@pytest.mark.parametrize(
    ("model_type", "section"),
    [("mpt", "attn_config"), ("dbrx", "attn_config"), ("dbrx", "ffn_config"), ("gemma3", "text_config")],
)
def test_sections_have_the_fields_of_any_config(model_type, section):
    """transformers writes those into each."""
    general = {"chunk_size_feed_forward": 0, "is_encoder_decoder": False, "id2label": {}, "dtype": "float32"}
    assert model_config({"model_type": model_type, section: general}) == model_config({"model_type": model_type})
    with pytest.raises(ValueError, match=f"{section}: 'is_encoder_decoder' is True; only False"):
        model_config({"model_type": model_type, section: {"is_encoder_decoder": True}})


def test_sizes_that_follow_from_others():
    assert config("nemotron").head_dim == 8
    assert config("opt", word_embed_proj_dim=None).embedding_size is None
    assert config("bloom", n_embed=64, n_inner=None).mlp_size == 256


def test_gemma3_s_head_is_tied_unless_both_sections_deny_it():
    for outer, tied in ({}, True), ({"tie_word_embeddings": False}, False):
        fields = {"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}, **outer}
        assert model_config(fields).tied_head == tied


def test_phi3_takes_the_trained_length_beside_the_section():
    """4096 by default, whatever the section says: another there is a contradiction."""
    scaling = {"type": "longrope", "short_factor": [1] * 4, "long_factor": [2] * 4}
    assert config("phi3", rope_scaling=scaling).rope.original_max_position == 4096
    scaling["original_max_position_embeddings"] = 16
    assert config("phi3", original_max_position_embeddings=16, rope_scaling=scaling).rope.original_max_position == 16
    with pytest.raises(ValueError, match="'original_max_position_embeddings' is 4096 by default, but 16 in 'rope_scal"):
        config("phi3", rope_scaling=scaling)


@pytest.mark.parametrize("own", [{}, {"rotary_emb_base": 500.0, "rotary_pct": 0.5}])
@pytest.mark.parametrize("section", [{}, {"rope_theta": 500.0, "partial_rotary_factor": 0.5}])
def test_gpt_neox_has_names_of_its_own_for_rope_settings(own, section):
    usual = {"rope_theta": 500.0, "partial_rotary_factor": 0.5} if own or section else {}
    rope = config("gpt_neox", rope_parameters=section, **own, **usual).rope
    assert (rope.theta, rope.dims) == ((500.0, 4) if own or section else (10_000.0, 2))
    with pytest.raises(ValueError, match="'rope_theta' is 7"):
        config("gpt_neox", rope_parameters=section, **own, rope_theta=7.0)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        (
            "llama",
            {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 9.0}},
            "'rope_theta' is 7.0, but 'rope_theta' in ",
        ),
        (
            "llama",
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
            "say different things; keep one",
        ),
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 9.0}}, "say different things"),
        ("llama", {"rope_scaling": {**LINEAR, "type": "default"}}, "'type' is 'default', but 'rope_type' is 'linear'"),
        (
            "llama",
            {"original_max_position_embeddings": 8, "rope_scaling": {**LINEAR, "original_max_position_embeddings": 9}},
            "'original_max_position_embeddings' is 8, but 9 in 'rope_scaling'",
        ),
        ("glm", {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}, "is 0.5, but"),
        (
            "gpt_neox",
            {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "'rotary_pct' is 0.5, but",
        ),
        (
            "gemma3_text",
            {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "say different things",
        ),
        (
            "gemma3_text",
            {"rope_local_base_freq": 7.0, "rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}},
            "'rope_local_base_freq' is 7.0, but 'rope_theta' in 'sliding_attention' is 9.0",
        ),
        ("qwen3_moe", {**WINDOW, "layer_types": ["full_attention"] * 4}, "has full layers, but by .* all of them have"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 4}, "has sliding layers, but by .* none of them have"),
        ("olmo3", {"sliding_window_pattern": 2}, "'sliding_window_pattern' is 2; only 4"),
        ("gemma3_text", {"_sliding_window_pattern": 3}, "'_sliding_window_pattern' is 3; only 6"),
        ("gptj", {"tie_word_embeddings": True}, "'tie_word_embeddings' is True; only False"),
        ("phi", {"tie_word_embeddings": True}, "'tie_word_embeddings' is True; only False"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0; only None"),
        ("gpt_oss", {"sliding_window_pattern": 3}, "'sliding_window_pattern' is 3; only 2"),
        ("bloom", {"n_embed": 128}, "'hidden_size' is 64; only 128"),
        ("bloom", {"n_inner": 128}, "'n_inner' is 128; only None, 256"),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "'parallel_attn' is False with 'new_dec",
        ),
        (
            "dbrx",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            "'rope_parameters' is .*7.0}; only None",
        ),
        ("deepseek_v3", {"n_group": 7}, "8 experts of the best 4 of 7 groups of 256 experts: groups are alike"),
        ("deepseek_v3", {"n_group": 256, "topk_group": 16}, "8 experts of the best 16 of 256 groups"),
        ("deepseek_v3", {"topk_group": 9}, "8 experts of the best 9 of 8 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 33, "topk_group": 1}, "33 experts of the best 1 of 8 groups"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "'num_key_value_heads' is 2; only 8"),
    ],
)
def test_contradictions_are_refused(model_type, fields, message):
    """Rather than one of the two be taken."""
    with pytest.raises(ValueError, match=message):
        config(model_type, **fields)


def test_names_of_the_same_activation():
    assert {name for name, ours in ACTIVATIONS.items() if ours == "gelu"} == {"gelu", "gelu_python"}
    assert config("llama", hidden_act="gelu_accurate").activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("llama", {"rope_scaling": True}, "'rope_scaling' is True; it must be an object, or null"),
        ("ministral3", {"rope_parameters": 1}, "'rope_parameters' is 1; it must be an object"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": 1}},
            "rope_parameters: 'full_attention' is 1; it must be",
        ),
        ("dbrx", {"ffn_config": [1]}, r"'ffn_config' is \[1\]; it must be an object"),
        ("gemma2", {"layer_types": ["full_attention"]}, "'layer_types' has 1 entries for 4 layers; it must be a list"),
        ("ministral", {"layer_types": "full"}, "'layer_types' is 'full'; it must be a list with one for each layer"),
        ("smollm3", {"no_rope_layers": True}, "'no_rope_layers' is True; it must be a list"),
        (
            "qwen2",
            {"num_key_value_heads": 2, "max_window_layers": None},
            "'max_window_layers' is None; it must be a pos",
        ),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, r"'mlp_only_layers' is \['1'\]; it must be a list of integers"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "'first_k_dense_replace' is -1; it must be a positive integer"),
        ("gpt_neo", {"attention_types": [["global"]]}, "'attention_types' is .*; it must be a list of .kinds, times."),
        ("gpt_neo", {"attention_types": []}, "'attention_types' is of 0 layers, not 4"),
    ],
)
def test_malformed_fields(model_type, fields, message):
    """None of them is taken for a default."""
    with pytest.raises(ValueError, match=message):
        config(model_type, **fields)
