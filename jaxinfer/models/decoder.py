"""The decoder: embedding, layers, final norm, head."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import Attention, AttentionInputs
from jaxinfer.models.layers import Embedding, GatedMlp, Head, RMSNorm
from jaxinfer.parameters import Tree
from meshes import sharding
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.target import Target


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, weights: Tree, mesh: Mesh):
        self.attention_norm = RMSNorm(config.norm_eps, weights["attention_norm"])
        self.attention = Attention(config, layer, weights["attention"], mesh)
        self.mlp_norm = RMSNorm(config.norm_eps, weights["mlp_norm"])
        self.mlp = GatedMlp(config, weights["mlp"], mesh)

    def __call__(self, x: jax.Array, cache: KVPages, inputs: AttentionInputs) -> tuple[jax.Array, KVPages]:
        """x: [tokens, embed]. Under tensor parallelism each half ends in one all-reduce: x is whole on every device."""
        x, cache = self.attention(x, self.attention_norm, cache, inputs)
        return self.mlp(x, self.mlp_norm, inputs.target), cache


@functools.partial(jax.jit, static_argnums=0)
def _run(
    graph: nnx.GraphDef, weights: nnx.State, x: jax.Array, cache: KVPages, inputs: AttentionInputs
) -> tuple[jax.Array, KVPages]:
    """One layer. Under jit of its own it is traced once for all layers alike; the compiler still unrolls them."""
    return nnx.merge(graph, weights)(x, cache, inputs)


class Decoder(nnx.Module):
    """A decoder over the weights it is given: arrays, or ShapeDtypeStructs to learn its structure."""

    def __init__(self, config: ModelConfig, weights: Tree, mesh: Mesh):
        self.replicated = sharding(mesh)
        self.by_vocab = sharding(mesh, (None, "vocab"))
        self.embed = Embedding(weights["embed"])
        self.layers = nnx.List([DecoderLayer(config, i, weights["layers"][i], mesh) for i in range(config.num_layers)])
        self.final_norm = RMSNorm(config.norm_eps, weights["final_norm"])
        self.head = None if config.tied_head else Head(config, weights["head"], mesh)
        self.vocab_size = config.vocab_size

    def __call__(
        self, tokens: jax.Array, cache: Sequence[KVPages], inputs: Sequence[AttentionInputs]
    ) -> tuple[jax.Array, list[KVPages]]:
        """tokens: [tokens] i32; cache and inputs: one entry per layer. Returns the last layer's [tokens, embed]."""
        x = jax.lax.with_sharding_constraint(self.embed(tokens), self.replicated)
        new_cache = []
        for layer, layer_cache, layer_inputs in zip(self.layers, cache, inputs, strict=True):
            x, layer_cache = _run(*nnx.split(layer), x, layer_cache, layer_inputs)
            new_cache.append(layer_cache)
        return x, new_cache

    def logits(self, x: jax.Array, target: Target) -> jax.Array:
        """x: [rows, embed], rows of `__call__`'s result; returns [rows, vocab_size] float32, padding rows left out."""
        x = self.final_norm(x)
        logits = self.embed.logits(x) if self.head is None else self.head.logits(x, target)
        # Said in two steps, or the compiler gathers the head's weights rather than the logits.
        logits = jax.lax.with_sharding_constraint(logits, self.by_vocab)
        return jax.lax.with_sharding_constraint(logits, self.replicated)[:, : self.vocab_size]
