"""A checkpoint's model run one layer at a time, for work that need not be fast: memory holds the weights of one.

The modules are those of `jaxinfer.models`, in float32 on one device, whatever the weights are stored in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.checkpoint import Checkpoint
from convert.loading import load_one
from jaxinfer.config import ModelConfig
from jaxinfer.engine import cache
from jaxinfer.engine.batch import BatchShape
from jaxinfer.engine.step import attention_planner, layer_inputs, sequence_of_token, target_of
from jaxinfer.models import Decoder
from jaxinfer.models.decoder import DecoderLayer, Kept, LayerInputs
from jaxinfer.models.norms import add
from jaxinfer.models.observe import Observer, observed
from jaxinfer.parameters import Parameter, Tree, declare, flatten, is_quantized, unflatten
from jaxinfer.weights import abstract_weights
from meshes import build_mesh
from pallas_kernels.formats import QuantizedArray, dequantize
from pallas_kernels.target import Target

PAGE_SIZE = 64


class LayerByLayer:
    """Runs sequences of one length, each from its start, through the layers of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, length: int, dtype: Any, observer: Observer | None = None):
        """length: tokens of a sequence; dtype: in which weights are read before they become float32.

        observer: is handed the inputs of the projections, as by `models.observe`.
        """
        self.config = checkpoint.config.for_length(length)
        self._checkpoint = checkpoint
        self._mesh = build_mesh(devices=jax.devices()[:1])
        self._leaves = dict(
            flatten(abstract_weights(self.config, jnp.dtype(dtype), self._mesh, checkpoint.quantization))
        )
        self._parameters: dict[str, Parameter] = dict(flatten(declare(self.config)))
        self._positions = jnp.arange(length, dtype=jnp.int32)
        self._pages, self._inputs = attention_over(
            self.config, length, self._mesh, jnp.dtype(jnp.float32), target_of(self._mesh)
        )
        self._run = jax.jit(functools.partial(_run, observer), static_argnums=0)

    def read(self, path: str) -> Any:
        """One weight in the checkpoint's dtype, or as it is quantized there."""
        return load_one(path, self._checkpoint, self._leaves, self._checkpoint.config)

    def float32(self, path: str, weight: Any) -> jax.Array:
        """What a weight stands for, in the shape in which it is declared."""
        if not is_quantized(weight):
            return weight.astype(jnp.float32)
        return restored(weight, self._parameters[path])

    def layer_weights(self, layer: int) -> dict[str, jax.Array]:
        """Path → float32 weight of one layer."""
        prefix = f"layers.{layer}."
        return {path: self.float32(path, self.read(path)) for path in self._leaves if path.startswith(prefix)}

    def embedded(self, tokens: Sequence[int]) -> jax.Array:
        """[length, embed] f32: what the first layer takes."""
        front = {"tied_head": True, "head_bias": False, "final_norm": False}
        ids = jnp.asarray(tokens, jnp.int32)
        return self._ends(**front)(ids, self._positions, [], [])[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[length, vocab] f32. hidden: the last layer's."""
        return self._ends().logits(hidden, self._inputs[0].target)

    def run(self, layer: int, weights: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
        """[length, embed] f32: one layer's output. weights: as `layer_weights` gives them; hidden: its input."""
        module = DecoderLayer(self.config, layer, unflatten(weights)["layers"][layer], self._mesh)
        return self._run(*nnx.split(module), hidden, self._pages[layer], self._inputs[layer])

    def _ends(self, **changes: Any) -> Decoder:
        """The model without its layers."""
        per_layer: dict[str, Any] = dict.fromkeys(("windows", "chunks", "dense_layers", "recurrent_layers"), ())
        config = dataclasses.replace(self.config, num_layers=0, **per_layer, **changes)
        wanted = [path for path, _ in flatten(declare(config))]
        tree = unflatten({path: self.float32(path, self.read(path)) for path in wanted})
        for name, parameters in empty_parts(declare(config)):
            tree[name] = parameters
        return Decoder(config, tree, self._mesh)


def empty_parts(tree: Tree) -> list[tuple[str, Tree]]:
    """Parts without weights, such as a norm that has neither scale nor bias, which no path names."""
    return [(name, {}) for name, part in tree.items() if not part]


def _run(
    observer: Observer | None,
    graph: nnx.GraphDef,
    weights: nnx.State,
    hidden: jax.Array,
    pages: Kept,
    inputs: LayerInputs,
) -> jax.Array:
    layer: Callable[..., Any] = nnx.merge(graph, weights)
    if observer is None:
        x, delta, _ = layer(hidden, None, pages, inputs)
    else:
        with observed(observer):
            x, delta, _ = layer(hidden, None, pages, inputs)
    return add(x, delta)


def restored(weight: QuantizedArray, parameter: Parameter) -> jax.Array:
    """The canonical float32 weight, [*batch, *inputs, *outputs], that a quantized one stands for."""
    return jnp.moveaxis(dequantize(weight, jnp.float32), -1, parameter.batch).reshape(parameter.shape)


def attention_over(
    config: ModelConfig, length: int, mesh: Any, dtype: jnp.dtype, target: Target
) -> tuple[list[Kept], list[LayerInputs]]:
    """Empty pages and states, and how a batch of one sequence of `length` tokens lies in them: one of each per layer.

    dtype: of the activations and the pages; target: what is compiled for.
    """
    width, groups = -(-length // PAGE_SIZE), len(config.cache_groups)
    abstract = cache.abstract_cache(config, (width,) * groups, PAGE_SIZE, dtype, mesh, max_num_seqs=1)
    # Layers of a kind differ in how far they look back only.
    kinds = [config.is_recurrent(layer) for layer in range(config.num_layers)]
    kept = dict(zip(kinds, abstract, strict=True))
    made = dict(zip(kept, cache.allocate(list(kept.values())), strict=True))
    every = [made[kind] for kind in kinds]
    shape = BatchShape(length, 1, width, groups, decode=False, sampling="greedy")
    arrays = {
        "positions": jnp.arange(length, dtype=jnp.int32),
        "query_start": jnp.array([0, length], jnp.int32),
        "lengths": jnp.array([length], jnp.int32),
        "slots": jnp.zeros(1, jnp.int32),
        "block_tables": jnp.asarray(np.tile(np.arange(width, dtype=np.int32), (groups, 1, 1))),
    }
    planner = attention_planner(shape, config, dtype, target, 1)
    sequence = sequence_of_token(arrays, shape)
    return every, layer_inputs(arrays, shape, sequence, config, every, planner, target)
