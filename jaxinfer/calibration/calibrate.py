"""A checkpoint's projections in 4 bits, calibrated on a text, one layer at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from convert.checkpoint import NUMPY_DTYPES, Checkpoint
from convert.destination import fingerprint, resumable_scratch
from jaxinfer import parameters
from jaxinfer.calibration.experts import calibrate_experts
from jaxinfer.calibration.gptq import add_moments, gptq
from jaxinfer.calibration.ready import Ready
from jaxinfer.config import Quantization
from jaxinfer.layerwise import LayerByLayer, restored
from jaxinfer.models.moe import CHOICES
from jaxinfer.parameters import Parameter, declare, flatten, is_stored_in, moe_parameters
from jaxinfer.tokenizer import Tokenizer
from pallas_kernels.formats import QuantizedArray

LENGTH = 512
"""Tokens of a sequence, as far as the model takes so many."""
MIN_TOKENS = 512
MAX_SEQUENCES = 256
"""More text is left out: second moments change little after so much."""


@contextmanager
def calibrated(
    checkpoint: Checkpoint, file: Path, quantization: Quantization, *, dtype: str | None = None, beside: Path
) -> Iterator[Ready]:
    """The weights that `calibrate` makes with the text in `file`, in a hidden folder beside a path until they are used.

    What an interrupted run made of the same text, checkpoint and settings is found there and kept.
    Raises FileNotFoundError for a checkpoint without tokenizer, and what `calibrate` and `read_ids` raise.
    """
    ids = read_ids(file, Tokenizer.load(checkpoint.path))
    same = fingerprint(checkpoint, ids=hashlib.sha256(np.asarray(ids)).hexdigest(), made=quantization, dtype=dtype)
    with resumable_scratch(beside, same) as finished:
        ready = Ready(finished.folder, finished)
        calibrate(checkpoint, ids, quantization, ready, dtype=dtype)
        yield ready


def read_ids(file: Path, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a UTF-8 text. Raises ValueError if it is no such text, or has fewer than MIN_TOKENS."""
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}); calibration takes plain text") from error
    return check_ids(tokenizer.encode(text), str(file))


def check_ids(ids: Sequence[int], name: str) -> list[int]:
    """Raises ValueError if there are fewer than MIN_TOKENS."""
    if len(ids) < MIN_TOKENS:
        raise ValueError(
            f"{name} has {len(ids)} tokens, and calibration takes {MIN_TOKENS} or more; some thousands of text like "
            "what the model is for are good"
        )
    return list(ids)


def calibrate(
    checkpoint: Checkpoint,
    ids: Sequence[int],
    quantization: Quantization,
    ready: Ready,
    *,
    dtype: str | None = None,
    progress: bool = True,
) -> None:
    """Put every projection of the layers into `ready`, quantized to int4 by GPTQ.

    A layer is calibrated on what the quantized layers before it give, so it also makes up for them; within a layer the
    projections are taken in the order in which they are declared. An expert is calibrated on the tokens that chose it.
    What is in `ready` already, of an interrupted run, stays as it is.
    ids: the text, cut into sequences. dtype: of what is not quantized, which scales have too; None: the checkpoint's
    own. Memory: one layer in float32, the second moments of one projection, and the hidden states of the text; of a
    layer with experts, also what these take.
    Raises ValueError for another format than int4, groups that do not divide the model, and a text that is too short.
    """
    if quantization.format != "int4":
        raise ValueError(f"{quantization.format} is not calibrated: rounding to nearest is close enough; use int4")
    if checkpoint.quantization is not None:
        raise ValueError(f"{checkpoint.path} is quantized to {checkpoint.quantization.format} already")
    resolved = parameters.resolve(checkpoint.config, quantization)
    assert resolved is not None
    check_ids(ids, "the text")
    stored = NUMPY_DTYPES[dtype or checkpoint.dtype]
    length = min(LENGTH, checkpoint.config.max_position)
    count = min(len(ids) // length, MAX_SEQUENCES)
    seen: dict[str, np.ndarray] = {}

    def keep(name: str, x: jax.Array) -> None:
        seen[name] = np.array(x)  # a copy: what an observer is handed may go when it returns

    model = LayerByLayer(checkpoint, length, stored, keep)
    hidden = [np.asarray(model.embedded(ids[n * length : (n + 1) * length])) for n in range(count)]
    declared = dict(flatten(declare(checkpoint.config)))
    for layer in tqdm(range(model.config.num_layers), "calibrating", disable=None if progress else True, unit="layer"):
        weights, prefix = model.layer_weights(layer), f"layers.{layer}."
        wanted = {
            path: parameter
            for path, parameter in declared.items()
            if path.startswith(prefix) and is_stored_in(parameter, resolved)
        }
        kept = _kept(wanted, ready, stored, resolved)
        experts = [path for path in wanted if wanted[path].batch]
        for path, parameter in wanted.items():
            if path in kept:
                weights[path] = restored(ready[path], parameter)
            elif not parameter.batch:
                moment = _second_moment(model, layer, weights, hidden, seen, path.removeprefix(prefix), parameter)
                flat = weights[path].reshape(parameter.inputs, -1).astype(stored)
                made = _shaped(gptq(flat, moment, resolved), parameter)
                ready.put(path, made)
                weights[path] = restored(made, parameter)
            elif path == experts[0]:  # all of a layer's together
                _experts(model, layer, weights, hidden, seen, resolved, stored, ready)
        hidden = [np.asarray(model.run(layer, weights, jnp.asarray(x))) for x in hidden]


def _kept(wanted: dict[str, Parameter], ready: Ready, dtype: Any, quantization: Quantization) -> set[str]:
    """Those of a layer's weights that an interrupted run made; the experts' all, or none."""

    def is_there(path: str, parameter: Parameter) -> bool:
        return ready.find(path, parameters.abstract_parameter(parameter, dtype, lambda axes: None, quantization))

    kept = {path for path, parameter in wanted.items() if is_there(path, parameter)}
    experts = {path for path, parameter in wanted.items() if parameter.batch}
    return kept if experts <= kept else kept - experts


def _experts(
    model: LayerByLayer,
    layer: int,
    weights: dict[str, jax.Array],
    hidden: list[np.ndarray],
    seen: dict[str, np.ndarray],
    quantization: Quantization,
    dtype: Any,
    ready: Ready,
) -> None:
    """The experts of one layer into `ready`, and what they mean in place of their weights."""
    rows, chosen = [], []
    for x in hidden:
        seen.clear()
        model.run(layer, weights, jnp.asarray(x)).block_until_ready()
        jax.effects_barrier()
        rows.append(seen["mlp.expert_gate_up"])
        chosen.append(seen[CHOICES])
    prefix, parameters = f"layers.{layer}.mlp.", moe_parameters(model.config)
    own = {path.removeprefix(prefix): weight for path, weight in weights.items() if path.startswith(prefix)}
    options = (model.config, quantization, dtype, f"layers.{layer}")
    for name, made in calibrate_experts(np.concatenate(rows), np.concatenate(chosen), own, *options).items():
        ready.put(prefix + name, made)
        weights[prefix + name] = restored(made, parameters[name])


def _second_moment(
    model: LayerByLayer,
    layer: int,
    weights: dict[str, jax.Array],
    hidden: list[np.ndarray],
    seen: dict[str, np.ndarray],
    name: str,
    parameter: Parameter,
) -> jax.Array:
    """[inputs, inputs] f32: the mean of x xᵀ over what one projection takes of the text."""
    total, rows = jnp.zeros((parameter.inputs, parameter.inputs), jnp.float32), 0
    for x in hidden:
        seen.clear()
        model.run(layer, weights, jnp.asarray(x)).block_until_ready()
        jax.effects_barrier()
        if name not in seen:
            raise ValueError(f"layer {layer} ran without {name}, which is to be calibrated; it ran {sorted(seen)}")
        total = add_moments(total, seen[name].reshape(-1, parameter.inputs))
        rows += len(x)
    return total / rows


def _shaped(weight: QuantizedArray, parameter: Parameter) -> QuantizedArray:
    """[outputs, …] parts with the outputs' own dimensions."""
    outputs = parameter.shape[parameter.contract :]
    return jax.tree.map(lambda part: part.reshape(*outputs, part.shape[-1]), weight)
