"""Llama in numpy, one sequence without a cache, its projections in 8 bits and what they take rounded, too, or not."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def decoder(config, tensors, ids, format, shards=1, activations=True):
    """[tokens, vocab] log-probabilities. config, tensors: of a checkpoint. shards: devices whose parts of what `o_proj`
    and `down_proj` take are rounded each alone; the head takes floats.
    """

    def project(x, name, parts=1):
        if activations:
            x = np.concatenate([rounded(part, format) for part in np.split(x, parts, axis=-1)], axis=-1)
        return x @ rounded(tensors[f"{name}.weight"], format).T

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * tensors[f"{name}.weight"]

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    x = tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        inner = norm(x, f"{name}.input_layernorm")
        q, k, v = (project(inner, f"{name}.self_attn.{part}_proj") for part in "qkv")
        x = x + project(attend(q, k, v, heads, kv_heads), f"{name}.self_attn.o_proj", shards)
        inner = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (project(inner, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        x = x + project(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj", shards)
    return np.log(softmax(norm(x, "model.norm") @ rounded(tensors["lm_head.weight"], format).T))


def rounded(x, format):
    """Each row over a scale of its own to 8 bits and back."""
    largest = 127.0 if format == "int8" else 448.0
    scales = np.abs(x).max(-1, keepdims=True) / largest
    steps = x / np.where(scales == 0, 1, scales)
    steps = np.rint(steps) if format == "int8" else steps.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return steps.astype(np.float64) * scales


def attend(q, k, v, heads, kv_heads):
    """Causal, with RoPE. q, k, v: [tokens, heads * head_dim]; returns the like of q."""
    tokens = len(q)
    q, k, v = (x.reshape(tokens, n, -1).transpose(1, 0, 2) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    k, v = (np.repeat(x, heads // kv_heads, axis=0) for x in (k, v))
    scores = rotate(q) @ rotate(k).transpose(0, 2, 1) / np.sqrt(q.shape[2])
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(tokens, -1)


def rotate(x, theta=10_000.0):
    """RoPE that turns dimension i with i + half. x: [heads, tokens, head_dim]"""
    half = x.shape[2] // 2
    turned = np.exp(1j * np.outer(np.arange(x.shape[1]), theta ** (-np.arange(half) / half)))
    pairs = (x[..., :half] + 1j * x[..., half:]) * turned
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
