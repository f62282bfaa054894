"""Tiny configs of the families without experts: what differs from Llama is in each."""

from __future__ import annotations

from typing import Any

from tests.tiny_shapes import GPT, SHAPE, SLIDING, case, without

DENSE: dict[str, dict[str, Any]] = {
    "ministral": case("ministral", "Ministral", sliding_window=12, layer_types=SLIDING, head_dim=8),
    "smollm3": case("smollm3", "SmolLM3", no_rope_layers=[1, 0], tie_word_embeddings=True, rope_theta=5000.0),
    "phi3": case("phi3", "Phi3", rms_norm_eps=1e-5, sliding_window=20, partial_rotary_factor=0.5),
    "granite": case(
        "granite",
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=1.5,
        attention_bias=True,
        mlp_bias=True,
    ),
    "olmo": case("olmo", "Olmo", clip_qkv=1.5),
    "olmo2": case("olmo2", "Olmo2", num_key_value_heads=4),
    "olmo3": case(
        "olmo3",
        "Olmo3",
        sliding_window=12,
        layer_types=SLIDING,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.1,
            },
        },
    ),
    "stablelm": case("stablelm", "StableLm", use_qkv_bias=True, partial_rotary_factor=0.25),
    "stablelm_parallel": case("stablelm", "StableLm", use_parallel_residual=True, partial_rotary_factor=0.5),
    "stablelm_qk_norm": case("stablelm", "StableLm", qk_layernorm=True, num_hidden_layers=1),
    "starcoder2": case("starcoder2", "Starcoder2", sliding_window=20, tie_word_embeddings=True),
    "exaone4": case("exaone4", "Exaone4", sliding_window=12, layer_types=SLIDING),
    "ernie4_5": case("ernie4_5", "Ernie4_5", use_bias=True, head_dim=8, tie_word_embeddings=True),
    "glm": case("glm", "Glm", head_dim=8, partial_rotary_factor=0.5),
    "glm4": case("glm4", "Glm4", head_dim=12, partial_rotary_factor=0.5, attention_bias=False),
    "cohere": case("cohere", "Cohere", use_qk_norm=True, logit_scale=0.8, tie_word_embeddings=True),
    "cohere2": case(
        "cohere2",
        "Cohere2",
        sliding_window=12,
        layer_types=SLIDING,
        logit_scale=0.8,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "nemotron": case("nemotron", "Nemotron", head_dim=8, partial_rotary_factor=0.5, hidden_act="relu2"),
    "gemma": case("gemma", "Gemma", head_dim=12, hidden_act="gelu", tie_word_embeddings=True),
    "gemma2": case(
        "gemma2",
        "Gemma2",
        head_dim=12,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=12,
        query_pre_attn_scalar=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "gemma3_text": case(
        "gemma3_text",
        "Gemma3",
        head_dim=8,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=12,
        sliding_window_pattern=2,
        query_pre_attn_scalar=6,
        rope_theta=20000.0,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        tie_word_embeddings=True,
    ),
    "gpt2": case("gpt2", "GPT2LMHeadModel", GPT),
    "gpt_bigcode": case("gpt_bigcode", "GPTBigCode", GPT, multi_query=True),
    "gpt_bigcode_heads": case("gpt_bigcode", "GPTBigCode", GPT, multi_query=False, n_inner=40),
    "gpt_neo": case(
        "gpt_neo",
        "GPTNeo",
        without("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=12,
    ),
    "gptj": case("gptj", "GPTJ", GPT, rotary_dim=4, tie_word_embeddings=False),
    "gpt_neox": case(
        "gpt_neox", "GPTNeoX", without("num_key_value_heads"), rotary_pct=0.5, rotary_emb_base=5000, hidden_act="gelu"
    ),
    "gpt_neox_sequential": case(
        "gpt_neox", "GPTNeoX", without("num_key_value_heads"), rotary_pct=0.25, use_parallel_residual=False
    ),
    "opt": case("opt", "OPT", without("intermediate_size", "num_key_value_heads"), ffn_dim=48),
    "opt_350m": case(
        "opt",
        "OPT",
        without("intermediate_size", "num_key_value_heads"),
        ffn_dim=48,
        word_embed_proj_dim=24,
        do_layer_norm_before=False,
    ),
    "bloom": case(
        "bloom",
        "Bloom",
        without(*(name for name in SHAPE if name.startswith(("num_", "intermediate", "max_")))),
        n_layer=2,
        n_head=4,
        seq_length=128,
    ),
    "falcon": case("falcon", "Falcon", without("intermediate_size", "num_key_value_heads")),
    "falcon_new": case(
        "falcon",
        "Falcon",
        without("intermediate_size", "num_key_value_heads"),
        num_kv_heads=2,
        new_decoder_architecture=True,
        bias=True,
    ),
    "falcon_alibi": case(
        "falcon",
        "Falcon",
        without("intermediate_size", "num_key_value_heads"),
        multi_query=False,
        parallel_attn=False,
        alibi=True,
        bias=True,
    ),
    "mpt": case(
        "mpt",
        "Mpt",
        {name: value for name, value in SHAPE.items() if name in ("vocab_size", "bos_token_id", "eos_token_id")},
        d_model=48,
        n_heads=6,  # no power of two, where the slopes of ALiBi have another rule
        n_layers=2,
        max_seq_len=128,
        attn_config={"alibi": True, "clip_qkv": 1.5, "softmax_scale": 0.5},
    ),
    "phi3_longrope": case(
        "phi3",
        "Phi3",
        original_max_position_embeddings=4,  # so that the shortest prompts of the golden pass it
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 5.0, 9.0],
        },
    ),
    "phi": case("phi", "Phi", partial_rotary_factor=0.5),
    "ministral3": case(
        "ministral3",
        "Ministral3",
        head_dim=8,
        rope_parameters={
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.4,
        },
    ),
    "baichuan_7b": case("baichuan", "Baichuan", without("num_key_value_heads"), norm_head=False),
    "baichuan_13b": case(
        "baichuan",
        "Baichuan",
        without("num_key_value_heads", "max_position_embeddings"),
        hidden_size=48,
        num_attention_heads=6,
        model_max_length=128,
        norm_head=True,
    ),
}
"""Name → the checkpoint's config.json. Tensor parallel 1 and 2 fit them all."""
for _name in ("gpt2", "gpt_bigcode", "gpt_bigcode_heads"):
    DENSE[_name]["architectures"] = [DENSE[_name]["architectures"][0].replace("LMHeadModelForCausalLM", "LMHeadModel")]
_BERT = without("num_key_value_heads", "tie_word_embeddings")
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"},
    "roberta": {
        **_BERT,
        "model_type": "roberta",
        "architectures": ["RobertaModel"],
        "pad_token_id": 3,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
    },
    "distilbert": {
        "model_type": "distilbert",
        "architectures": ["DistilBertModel"],
        **{name: SHAPE[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id", "torch_dtype")},
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
    },
}
"""Those that embed text and generate none, named as their transformers classes name them: without prefix and head."""
