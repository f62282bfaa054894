"""The forward pass as a StableHLO artifact, which jax alone reloads and runs: no model code of ours, no kernels."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp

from convert.checkpoint import NUMPY_DTYPES, Checkpoint
from convert.destination import check_destination, whole_or_not_at_all
from jaxinfer.config import ModelConfig
from jaxinfer.layerwise import attention_over, empty_parts
from jaxinfer.models import Decoder
from jaxinfer.parameters import declare, flatten, unflatten
from meshes import build_mesh
from pallas_kernels.target import CPU

PROGRAM, DESCRIPTION = "forward.stablehlo", "forward.json"
PLATFORMS = ("cpu", "cuda")


def export_forward(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, length: int, dtype: str | None = None, force: bool = False
) -> Path:
    """Write the folder `path`, complete or not at all: PROGRAM, what `jax.export` serialises of

        logits [1, length, vocab] f32 = f(weights, tokens [1, length] i32),

    and DESCRIPTION: the config, and name, shape and dtype of every weight. weights: name → canonical array, as a
    native checkpoint of the same `dtype` holds them; they are not part of the artifact.
    Raises ValueError for a model without a head, a quantized checkpoint and for lengths beyond the model's, and as
    `check_destination` does.
    """
    config, path = checkpoint.config, Path(path).expanduser()
    if checkpoint.quantization is not None:
        raise ValueError(f"{checkpoint.path} is quantized; export the original checkpoint")
    if not 0 < length <= config.max_position:
        raise ValueError(f"a length of {length} is not from 1 to the model's {config.max_position}")
    if config.headless:
        raise ValueError(f"{checkpoint.path} has no head, so no logits; only models that generate are exported")
    check_destination(path, force, checkpoint)
    name, config = dtype or checkpoint.dtype, config.for_length(length)
    if name not in NUMPY_DTYPES:
        raise ValueError(f"dtype '{name}' is not supported; supported: {', '.join(NUMPY_DTYPES)}")
    exported = jax.export.export(jax.jit(_forward(config, length, name)), platforms=PLATFORMS)(
        _shapes(config, name), jax.ShapeDtypeStruct((1, length), jnp.int32)
    )
    weights = {path: {"shape": leaf.shape, "dtype": name} for path, leaf in _shapes(config, name).items()}
    description = {"length": length, "platforms": PLATFORMS, "config": config.to_dict(), "weights": weights}
    with whole_or_not_at_all(path) as building:
        (building / PROGRAM).write_bytes(exported.serialize())
        (building / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    return path


def _shapes(config: ModelConfig, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(p.shape, NUMPY_DTYPES[dtype]) for path, p in flatten(declare(config))}


def _forward(config: ModelConfig, length: int, dtype: str) -> Callable[[dict[str, jax.Array], jax.Array], jax.Array]:
    """The portable path, on one device: kernels would tie the program to a GPU."""
    mesh = build_mesh(devices=jax.devices()[:1])

    def forward(weights: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        tree = unflatten(weights) | dict(empty_parts(declare(config)))
        pages, inputs = attention_over(config, length, mesh, jnp.dtype(NUMPY_DTYPES[dtype]), CPU)
        decoder = Decoder(config, tree, mesh)
        hidden, _ = decoder(tokens[0], jnp.arange(length, dtype=jnp.int32), pages, inputs)
        return decoder.logits(hidden, CPU)[None]

    return forward
