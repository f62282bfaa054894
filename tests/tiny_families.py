"""Tiny random checkpoints of the families: what differs from Llama is in each. Random norms, biases and positions.

Names and shapes of the tensors come from our own tables; that they are those of the family is what transformers says,
which loads each of these checkpoints strictly when scripts/make_goldens.py has it compute the golden, or, where it
lacks the family, scripts/plain_models.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.families import FAMILIES, model_config
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Parameter, declare, flatten

_SHAPE: dict[str, Any] = {
    "vocab_size": 99,  # odd, so that any mesh pads it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
_GPT: dict[str, Any] = {
    **{name: value for name, value in _SHAPE.items() if "_embeddings" not in name and not name.startswith("num_")},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
for _name in ("hidden_size", "intermediate_size"):
    del _GPT[_name]


def _case(model_type: str, architecture: str, shape: Mapping[str, Any] = _SHAPE, **fields: Any) -> dict[str, Any]:
    return {**shape, "model_type": model_type, "architectures": [f"{architecture}ForCausalLM"], **fields}


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _SHAPE.items() if name not in names}


_SLIDING = ["sliding_attention", "full_attention"]

_LATENT = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
}

CASES: dict[str, dict[str, Any]] = {
    "ministral": _case("ministral", "Ministral", sliding_window=12, layer_types=_SLIDING, head_dim=8),
    "smollm3": _case("smollm3", "SmolLM3", no_rope_layers=[1, 0], tie_word_embeddings=True, rope_theta=5000.0),
    "phi3": _case("phi3", "Phi3", rms_norm_eps=1e-5, sliding_window=20, partial_rotary_factor=0.5),
    "granite": _case(
        "granite",
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=1.5,
        attention_bias=True,
        mlp_bias=True,
    ),
    "olmo": _case("olmo", "Olmo", clip_qkv=1.5),
    "olmo2": _case("olmo2", "Olmo2", num_key_value_heads=4),
    "olmo3": _case(
        "olmo3",
        "Olmo3",
        sliding_window=12,
        layer_types=_SLIDING,
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
    "stablelm": _case("stablelm", "StableLm", use_qkv_bias=True, partial_rotary_factor=0.25),
    "stablelm_parallel": _case("stablelm", "StableLm", use_parallel_residual=True, partial_rotary_factor=0.5),
    "stablelm_qk_norm": _case("stablelm", "StableLm", qk_layernorm=True, num_hidden_layers=1),
    "starcoder2": _case("starcoder2", "Starcoder2", sliding_window=20, tie_word_embeddings=True),
    "exaone4": _case("exaone4", "Exaone4", sliding_window=12, layer_types=_SLIDING),
    "ernie4_5": _case("ernie4_5", "Ernie4_5", use_bias=True, head_dim=8, tie_word_embeddings=True),
    "glm": _case("glm", "Glm", head_dim=8, partial_rotary_factor=0.5),
    "glm4": _case("glm4", "Glm4", head_dim=12, partial_rotary_factor=0.5, attention_bias=False),
    "cohere": _case("cohere", "Cohere", use_qk_norm=True, logit_scale=0.8, tie_word_embeddings=True),
    "cohere2": _case(
        "cohere2",
        "Cohere2",
        sliding_window=12,
        layer_types=_SLIDING,
        logit_scale=0.8,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "nemotron": _case("nemotron", "Nemotron", head_dim=8, partial_rotary_factor=0.5, hidden_act="relu2"),
    "gemma": _case("gemma", "Gemma", head_dim=12, hidden_act="gelu", tie_word_embeddings=True),
    "gemma2": _case(
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
    "gemma3_text": _case(
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
    "gpt2": _case("gpt2", "GPT2LMHeadModel", _GPT),
    "gpt_bigcode": _case("gpt_bigcode", "GPTBigCode", _GPT, multi_query=True),
    "gpt_bigcode_heads": _case("gpt_bigcode", "GPTBigCode", _GPT, multi_query=False, n_inner=40),
    "gpt_neo": _case(
        "gpt_neo",
        "GPTNeo",
        _without("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"),
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=12,
    ),
    "gptj": _case("gptj", "GPTJ", _GPT, rotary_dim=4, tie_word_embeddings=False),
    "gpt_neox": _case(
        "gpt_neox", "GPTNeoX", _without("num_key_value_heads"), rotary_pct=0.5, rotary_emb_base=5000, hidden_act="gelu"
    ),
    "gpt_neox_sequential": _case(
        "gpt_neox", "GPTNeoX", _without("num_key_value_heads"), rotary_pct=0.25, use_parallel_residual=False
    ),
    "opt": _case("opt", "OPT", _without("intermediate_size", "num_key_value_heads"), ffn_dim=48),
    "opt_350m": _case(
        "opt",
        "OPT",
        _without("intermediate_size", "num_key_value_heads"),
        ffn_dim=48,
        word_embed_proj_dim=24,
        do_layer_norm_before=False,
    ),
    "bloom": _case(
        "bloom",
        "Bloom",
        _without(*(name for name in _SHAPE if name.startswith(("num_", "intermediate", "max_")))),
        n_layer=2,
        n_head=4,
        seq_length=128,
    ),
    "falcon": _case("falcon", "Falcon", _without("intermediate_size", "num_key_value_heads")),
    "falcon_new": _case(
        "falcon",
        "Falcon",
        _without("intermediate_size", "num_key_value_heads"),
        num_kv_heads=2,
        new_decoder_architecture=True,
        bias=True,
    ),
    "falcon_alibi": _case(
        "falcon",
        "Falcon",
        _without("intermediate_size", "num_key_value_heads"),
        multi_query=False,
        parallel_attn=False,
        alibi=True,
        bias=True,
    ),
    "mpt": _case(
        "mpt",
        "Mpt",
        {name: value for name, value in _SHAPE.items() if name in ("vocab_size", "bos_token_id", "eos_token_id")},
        d_model=48,
        n_heads=6,  # no power of two, where the slopes of ALiBi have another rule
        n_layers=2,
        max_seq_len=128,
        attn_config={"alibi": True, "clip_qkv": 1.5, "softmax_scale": 0.5},
    ),
    "mixtral": _case("mixtral", "Mixtral", num_local_experts=6, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": _case(
        "qwen2_moe",
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
    ),
    "qwen3_moe": _case(
        "qwen3_moe",
        "Qwen3Moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        head_dim=8,
    ),
    "qwen3_next": _case(
        "qwen3_next",
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "minimax": _case(
        "minimax",
        "MiniMax",
        num_hidden_layers=3,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        head_dim=12,
        num_local_experts=6,
        num_experts_per_tok=2,
        full_attn_alpha_factor=1.5,
        full_attn_beta_factor=0.7,
        linear_attn_alpha_factor=0.8,
        linear_attn_beta_factor=1.2,
        mlp_alpha_factor=1.3,
        mlp_beta_factor=0.9,
    ),
    "olmoe": _case("olmoe", "Olmoe", num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, clip_qkv=1.5),
    "dbrx": _case(
        "dbrx",
        "Dbrx",
        {name: value for name, value in _SHAPE.items() if name in ("vocab_size", "bos_token_id", "eos_token_id")},
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=128,
        attn_config={"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
    ),
    "deepseek_v2": _case(
        "deepseek_v2",
        "DeepseekV2",
        _without("num_key_value_heads"),
        **_LATENT,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_shared_experts=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3": _case(
        "deepseek_v3",
        "DeepseekV3",
        {**_SHAPE, "num_key_value_heads": 4},
        **_LATENT,
        q_lora_rank=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
        rope_scaling={
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    ),
    "gpt_oss": _case(
        "gpt_oss",
        "GptOss",
        num_local_experts=6,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=12,
        layer_types=_SLIDING,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    "phi3_longrope": _case(
        "phi3",
        "Phi3",
        original_max_position_embeddings=4,  # so that the shortest prompts of the golden pass it
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 5.0, 9.0],
        },
    ),
    "granitemoe": _case(
        "granitemoe",
        "GraniteMoe",
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.25,
        logits_scaling=1.5,
        tie_word_embeddings=True,
    ),
    "phi": _case("phi", "Phi", partial_rotary_factor=0.5),
    "llama4_text": _case(
        "llama4_text",
        "Llama4",
        head_dim=8,
        intermediate_size_mlp=40,
        attention_bias=True,
        attention_chunk_size=12,  # no multiple of a page
        no_rope_layers=[1, 0],
        floor_scale=5,
        attn_scale=0.4,
        interleave_moe_layer_step=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "ministral3": _case(
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
    "baichuan_7b": _case("baichuan", "Baichuan", _without("num_key_value_heads"), norm_head=False),
    "baichuan_13b": _case(
        "baichuan",
        "Baichuan",
        _without("num_key_value_heads", "max_position_embeddings"),
        hidden_size=48,
        num_attention_heads=6,
        model_max_length=128,
        norm_head=True,
    ),
    "arctic": _case(
        "arctic",
        "Arctic",
        moe_layer_frequency=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        parallel_attn_mlp_res=True,
        use_residual=True,
    ),
}
"""Name → the checkpoint's config.json. Tensor parallel 1 and 2 fit them all."""
_BERT = _without("num_key_value_heads", "tie_word_embeddings")
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
        **{name: _SHAPE[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id", "torch_dtype")},
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
    },
}
"""Those that embed text and generate none, named as their transformers classes name them: without prefix and head."""
for _name in ("gpt2", "gpt_bigcode", "gpt_bigcode_heads"):
    CASES[_name]["architectures"] = [CASES[_name]["architectures"][0].replace("LMHeadModelForCausalLM", "LMHeadModel")]


NOT_IN_TRANSFORMERS = ("arctic", "baichuan")
"""What their checkpoints compute is what scripts/plain_models.py says."""

BARE = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt", *ENCODERS)
"""Families whose checkpoints here have names as without a head."""

SAME_AS = {
    "camembert": "roberta",
    "chatglm": "glm",
    "gemma3": "gemma3_text",
    "internlm2": "llama",
    "internlm3": "llama",
    "llama4": "llama4_text",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "mistral3": "ministral3",
    "xlm-roberta": "roberta",
}
"""Families without a checkpoint here → that whose arrays they hold, under other names."""


def weights(name: str) -> dict[str, np.ndarray]:
    """The float32 tensors of a case under their Hugging Face names."""
    config = model_config(CASES[name] if name in CASES else ENCODERS[name])
    table = FAMILIES[config.family].rows(config, ("bare",) if config.family in BARE else ())
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    tensors = {}
    for path, parameter in flatten(declare(config)):
        source = table[_generic(path)].of_layer(path.split(".")[1], config)
        slots = source.transform(np.broadcast_to(np.uint8(0), parameter.shape), config)
        for tensor, slot in zip(source.names, slots, strict=True):
            tensors[tensor] = _random(rng, path, parameter, slot.shape, config)
    return tensors


def _generic(path: str) -> str:
    return ".".join("{}" if part.isdigit() else part for part in path.split("."))


def _random(
    rng: np.random.Generator, path: str, parameter: Parameter, shape: tuple[int, ...], config: ModelConfig
) -> np.ndarray:
    """Norms around one, and the rest so large that logits vary and attention is far from uniform.

    A tied head is small and the last norm large, or every token would predict itself.
    """
    small = 2.0 * config.embedding_scale if config.tied_head and config.final_norm else 1.0
    if path.endswith("norm.scale"):
        first = 2.0 if config.bidirectional else 0.5
        gain = {"final_norm.scale": 2.0 if config.head_norm else small, "embed_norm.scale": first}.get(path, 1.0)
        return (gain * (0.5 + rng.random(shape)) - config.norm_offset).astype(np.float32)
    std = 0.3
    if "bias" not in path:
        fan_in = parameter.inputs if parameter.contract else parameter.fan_in
        std = fan_in**-0.5 * next((gain for part, gain in _GAINS.items() if part in path), 1.0)
        std = std / small if path == "embed.weight" else std
    return (rng.random(shape) * 2 - 1).astype(np.float32) * np.float32(std * 3**0.5)


_GAINS = {"router": 3.0, "embed": 2.0, "positions": 1.0, "qkv": 1.4, "up": 1.4, "out": 1.5, "down": 1.5, "head": 2.0}
