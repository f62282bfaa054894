"""The model: embedding, layers, final norm, head. An encoder is one without a head, whose attention looks both ways."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.models.attention import Attention, AttentionInputs
from jaxinfer.models.latent import LatentAttention
from jaxinfer.models.layers import DenseResidual, Embedding, Head, Mlp, Projection
from jaxinfer.models.lightning import Lightning
from jaxinfer.models.moe import Moe
from jaxinfer.models.norms import Norm, add
from jaxinfer.models.recurrent import GatedDelta, RecurrentInputs, RecurrentState
from jaxinfer.parameters import Tree, norm_names
from meshes import sharding
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.target import Target

type Kept = KVPages | RecurrentState
"""What a layer keeps between steps."""
type LayerInputs = AttentionInputs | RecurrentInputs


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), as far as the config does not say otherwise."""

    def __init__(self, config: ModelConfig, layer: int, weights: Tree, mesh: Mesh):
        self.config = config
        for name in norm_names(config):
            setattr(self, f"{name}_norm", Norm(config, weights.get(f"{name}_norm", {})))
        attention, mlp = _attention_of(config, layer), Moe if config.routes(layer) else Mlp
        self.attention = attention(config.of_half(layer, "attention"), layer, weights["attention"], mesh)
        self.mlp = mlp(config.of_half(layer, "mlp"), weights["mlp"], mesh)
        self.dense_norm = Norm(config, weights.get("dense_norm", {})) if "dense" in weights else None
        self.dense = DenseResidual(config, weights["dense"], mesh) if "dense" in weights else None

    def __call__(
        self, x: jax.Array, delta: jax.Array | None, cache: Kept, inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array | None, Kept]:
        """x, delta: [tokens, embed], the layer's input and what is still to be added to it; returns the same of its
        output. Under tensor parallelism each part ends in one all-reduce: both are whole on every device.
        """
        x, attended, cache = self.attention(x, delta, self._norms("attention"), cache, inputs)
        if self.config.parallel_residual:
            norms = self._norms("attention" if self.config.shared_norm else "mlp")
            x, delta = self.mlp(x, None, norms, inputs.target, inputs.places)
            assert delta is not None  # norms are before the halves
            return x, add(delta, attended), cache
        if self.dense is not None:
            _, routed = self.mlp(x, None, self._norms("mlp"), inputs.target)
            x, delta = self.dense(x, attended, self._norms("dense"), inputs.target)
            assert delta is not None  # norms are before the halves
            return x, add(delta, routed), cache
        return *self.mlp(x, attended, self._norms("mlp"), inputs.target, inputs.places), cache

    def _norms(self, half: str) -> Tree:
        """The weights of the norms around a half."""
        placed = {"norm": f"{half}_norm", "output_norm": f"{half}_output_norm"}
        return {place: getattr(self, name).weights() for place, name in placed.items() if hasattr(self, name)}


def _attention_of(config: ModelConfig, layer: int) -> type[Attention]:
    """What a layer has in the place of attention."""
    if config.is_recurrent(layer):
        return {"gated_delta": GatedDelta, "lightning": Lightning}[config.recurrence]
    return LatentAttention if config.kv_lora_rank else Attention


@functools.partial(jax.jit, static_argnums=0)
def _run(
    graph: nnx.GraphDef,
    weights: nnx.State,
    x: jax.Array,
    delta: jax.Array | None,
    cache: Kept,
    inputs: LayerInputs,
) -> tuple[jax.Array, jax.Array | None, Kept]:
    """One layer. Under jit of its own it is traced once for all layers alike; the compiler still unrolls them."""
    return nnx.merge(graph, weights)(x, delta, cache, inputs)


class Decoder(nnx.Module):
    """A decoder over the weights it is given: arrays, or ShapeDtypeStructs to learn its structure."""

    def __init__(self, config: ModelConfig, weights: Tree, mesh: Mesh):
        self.replicated = sharding(mesh)
        self.by_vocab = sharding(mesh, (None, "vocab"))
        self.config = config
        self.embed = Embedding(weights["embed"])
        self.project_in = Projection(weights["project_in"]) if "project_in" in weights else None
        self.positions = Embedding(weights["positions"]) if config.learned_positions else None
        self.token_types = Embedding(weights["token_types"]) if config.token_types else None
        self.embed_norm = Norm(config, weights.get("embed_norm", {})) if config.embed_norm else None
        self.layers = nnx.List([DecoderLayer(config, i, weights["layers"][i], mesh) for i in range(config.num_layers)])
        self.final_norm = Norm(config, weights.get("final_norm", {})) if config.final_norm else None
        self.project_out = Projection(weights["project_out"]) if "project_out" in weights else None
        self.head = None if config.tied_head or config.headless else Head(config, weights["head"], mesh)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: Sequence[Kept], inputs: Sequence[LayerInputs]
    ) -> tuple[jax.Array, list[Kept]]:
        """tokens, positions: [tokens] i32; cache and inputs: one entry per layer.

        Returns the last layer's [tokens, embed].
        """
        x, delta = self._embedded(tokens, positions), None
        new_cache = []
        for layer, layer_cache, layer_inputs in zip(self.layers, cache, inputs, strict=True):
            x, delta, layer_cache = _run(*nnx.split(layer), x, delta, layer_cache, layer_inputs)
            new_cache.append(layer_cache)
        return add(x, delta), new_cache

    def without_cache(
        self, tokens: jax.Array, positions: jax.Array, scratch: Sequence[Kept], inputs: Sequence[LayerInputs]
    ) -> jax.Array:
        """The same of sequences that begin and end in these tokens: a layer writes over what the last of its kind kept.

        scratch: one entry per layer, alike for all of a kind, of which only one is used.
        """
        x, delta = self._embedded(tokens, positions), None
        kept = {type(one): one for one in scratch}
        for layer, one, layer_inputs in zip(self.layers, scratch, inputs, strict=True):
            x, delta, kept[type(one)] = _run(*nnx.split(layer), x, delta, kept[type(one)], layer_inputs)
        return add(x, delta)

    def _embedded(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """[tokens, embed]"""
        x = self.embed(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions(positions + self.config.position_offset)
        if self.token_types is not None:
            x = x + self.token_types.weight[0]
        x = x if self.embed_norm is None else self.embed_norm(x)
        return jax.lax.with_sharding_constraint(x, self.replicated)

    def final(self, x: jax.Array) -> jax.Array:
        """What the head takes, or, without one, the result. x: [rows, embed], rows of `__call__`'s."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x)

    def logits(self, x: jax.Array, target: Target) -> jax.Array:
        """x: [rows, embed], rows of `__call__`'s result; returns [rows, vocab_size] float32, padding rows left out."""
        x = self.final(x)
        logits = self.embed.logits(x) if self.head is None else self.head.logits(x, target)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.logit_soft_cap is not None:
            logits = self.config.logit_soft_cap * jnp.tanh(logits / self.config.logit_soft_cap)
        # Said in two steps, or the compiler gathers the head's weights rather than the logits.
        logits = jax.lax.with_sharding_constraint(logits, self.by_vocab)
        return jax.lax.with_sharding_constraint(logits, self.replicated)[:, : self.config.vocab_size]
