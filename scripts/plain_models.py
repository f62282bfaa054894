"""Decoders that transformers does not have, in plain numpy and float64: what the goldens of their families hold.

Written after the papers and the models' own code, one sequence at a time and without a cache: every token's scores
against every token before it. A function takes the config and the tensors of a checkpoint, both under Hugging Face's
names, and ids [tokens]; it returns the logits [tokens, vocab].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tensors = dict[str, Array]
Config = dict[str, Any]


def baichuan(config: Config, tensors: Tensors, ids: NDArray[np.integer]) -> Array:
    """Yang et al. 2023: the 7B model has RoPE, the 13B model ALiBi; Baichuan 2 normalises the rows of its head."""
    heads, rotary = config["num_attention_heads"], "max_position_embeddings" in config
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        inner = rms_norm(x, tensors[f"{name}.input_layernorm.weight"], config)
        packed = inner @ tensors[f"{name}.self_attn.W_pack.weight"].T
        q, k, v = (split_heads(part, heads) for part in np.split(packed, 3, axis=-1))
        out = attend(*map(rotate, (q, k)), v) if rotary else attend(q, k, v, alibi_slopes(heads))
        x = x + out @ tensors[f"{name}.self_attn.o_proj.weight"].T
        inner = rms_norm(x, tensors[f"{name}.post_attention_layernorm.weight"], config)
        x = x + gated_mlp(inner, *(tensors[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")))
    head = tensors["lm_head.weight"]
    if config["norm_head"]:
        head = head / np.sqrt((head * head).sum(1, keepdims=True))
    return rms_norm(x, tensors["model.norm.weight"], config) @ head.T


def arctic(config: Config, tensors: Tensors, ids: NDArray[np.integer]) -> Array:
    """Snowflake Arctic: a dense transformer, to whose layers a mixture of experts over their inputs is added."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        inner = rms_norm(x, tensors[f"{name}.input_layernorm.weight"], config)
        q, k, v = (inner @ tensors[f"{name}.self_attn.{part}_proj.weight"].T for part in "qkv")
        q, k, v = split_heads(q, heads), *(split_heads(part, kv_heads) for part in (k, v))
        k, v = (np.repeat(part, heads // kv_heads, axis=0) for part in (k, v))
        theta = config.get("rope_theta", 1e6)
        attended = x + attend(rotate(q, theta), rotate(k, theta), v) @ tensors[f"{name}.self_attn.o_proj.weight"].T
        routed = (layer + 1) % config["moe_layer_frequency"] == 0
        residual = routed and config["parallel_attn_mlp_res"]
        inner = rms_norm(x if residual else attended, tensors[f"{name}.post_attention_layernorm.weight"], config)
        added = (_experts if routed else _dense)(config, tensors, f"{name}.block_sparse_moe", inner)
        if residual:
            inner = rms_norm(attended, tensors[f"{name}.residual_layernorm.weight"], config)
            added = added + _w_mlp(tensors, f"{name}.residual_mlp", inner)
        x = attended + added
    return rms_norm(x, tensors["model.norm.weight"], config) @ tensors["lm_head.weight"].T


def _dense(config: Config, tensors: Tensors, name: str, x: Array) -> Array:
    return _w_mlp(tensors, f"{name}.mlp", x)


def _experts(config: Config, tensors: Tensors, name: str, x: Array) -> Array:
    """Of each token's best experts, weighted by their shares among themselves."""
    shares, out = softmax(x @ tensors[f"{name}.gate.weight"].T), np.zeros_like(x)
    for token, row in enumerate(shares):
        best = np.argsort(-row, kind="stable")[: config["num_experts_per_tok"]]
        for expert in best:
            given = _w_mlp(tensors, f"{name}.experts.{expert}", x[token])
            out[token] += row[expert] / row[best].sum() * given
    return out


def _w_mlp(tensors: Tensors, name: str, x: Array) -> Array:
    return gated_mlp(x, *(tensors[f"{name}.{weight}.weight"] for weight in ("w1", "w3", "w2")))


def rms_norm(x: Array, scale: Array, config: Config) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.get("rms_norm_eps", EPS[config["model_type"]])) * scale


def split_heads(x: Array, heads: int) -> Array:
    """[heads, tokens, head_dim] of [tokens, heads * head_dim]"""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def rotate(x: Array, theta: float = 10_000.0) -> Array:
    """RoPE that turns dimension i with i + half. x: [heads, tokens, head_dim]"""
    half = x.shape[2] // 2
    turned = np.exp(1j * np.outer(np.arange(x.shape[1]), theta ** (-np.arange(half) / half)))
    pairs = (x[..., :half] + 1j * x[..., half:]) * turned
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attend(q: Array, k: Array, v: Array, slopes: Array | None = None) -> Array:
    """Causal. q, k, v: [heads, tokens, head_dim]; returns [tokens, heads * head_dim]."""
    tokens = q.shape[1]
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2])
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    out = softmax(np.where(distance >= 0, scores, -np.inf)) @ v
    return out.transpose(1, 0, 2).reshape(tokens, -1)


def alibi_slopes(heads: int) -> Array:
    """Press et al. 2022: a geometric sequence; past a power of two, every other of the finer one as well."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    finer = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(2 * power)]
    return np.array([*slopes, *finer[::2][: heads - power]])


def gated_mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
    hidden = x @ gate.T
    return (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


EPS = {"arctic": 1e-5, "baichuan": 1e-6}
"""Of norms, where the config does not say."""
MODELS: dict[str, Callable[[Config, Tensors, NDArray[np.integer]], Array]] = {"arctic": arctic, "baichuan": baichuan}
"""`model_type` → its logits."""
