"""Whether a converted checkpoint holds what its source does: every tensor, and a forward pass over both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.checkpoint import NUMPY_DTYPES, Checkpoint
from jaxinfer.config import ModelConfig
from jaxinfer.layerwise import LayerByLayer, restored
from jaxinfer.parameters import Parameter, declare, flatten, is_quantized, parts_of
from pallas_kernels.formats import QuantizedArray

type Weight = Any
"""An array, or a QuantizedArray."""

PROMPT_TOKENS = 32
MAX_DIFFERENCE = 1e-4
"""Of log-probabilities of models with the same weights; sums may come in another order."""
STEPS = {"int8": 0.501, "int4": 0.55}
"""How far rounding to nearest leaves a weight from its value, in scales: half of one, and a little more for scales that
are themselves rounded, to the dtype of the activations."""


@dataclass(frozen=True)
class Row:
    """Tensors that were compared in the same way."""

    kind: str
    count: int
    nbytes: int
    """As the destination stores them."""
    worst: float
    """The largest difference, as a share of what is allowed; 0 where bits are compared."""


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    rows: list[Row]
    forward: str
    mismatches: list[str]

    def lines(self) -> Iterator[str]:
        for row in self.rows:
            much = f"at most {row.worst:.2f} of the rounding error allowed" if row.worst else "none"
            yield f"{row.kind:<22} {row.count:>6} tensors {row.nbytes / 1e6:>10.1f} MB   difference: {much}"
        yield self.forward
        yield from (f"MISMATCH {mismatch}" for mismatch in self.mismatches)


@dataclass(frozen=True)
class Comparison:
    """One tensor."""

    kind: str
    nbytes: int
    worst: float
    mismatch: str | None


def verify(source: Checkpoint, destination: Checkpoint, ready: Mapping[str, QuantizedArray] | None = None) -> Report:
    """Compare a checkpoint with what it was converted from, one tensor and one layer at a time.

    ready: path → weights that were calibrated, which are to be stored as they are. All else that is not quantized must
    have the source's bits, in the destination's dtype, and what is quantized be within its format's rounding.
    The forward pass is that of a few tokens: log-probabilities must agree if no weight was quantized.
    """
    differences = list(_config_differences(source.config, destination.config))
    if differences:
        return Report([], "no forward pass: the models differ", differences)
    length = min(PROMPT_TOKENS, source.config.max_position)
    dtype = NUMPY_DTYPES[destination.dtype]
    before, after = (LayerByLayer(checkpoint, length, dtype) for checkpoint in (source, destination))
    kinds: dict[str, list[Comparison]] = {}
    for path, parameter in flatten(declare(source.config)):
        want = ready[path] if ready is not None and path in ready else before.read(path)
        compared = compare(path, parameter, want, after.read(path))
        kinds.setdefault(compared.kind, []).append(compared)
    rows = [
        Row(kind, len(each), sum(one.nbytes for one in each), max(one.worst for one in each))
        for kind, each in kinds.items()
    ]
    mismatches = [one.mismatch for each in kinds.values() for one in each if one.mismatch is not None]
    forward, wrong = _forward(before, after, length, same=source.quantization == destination.quantization)
    return Report(rows, forward, mismatches + wrong)


def _config_differences(source: ModelConfig, destination: ModelConfig) -> Iterator[str]:
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(source, field.name), getattr(destination, field.name)
        if ours != theirs:
            yield f"config: {field.name} is {ours!r} in the source and {theirs!r} in the destination"


def compare(path: str, parameter: Parameter, want: Weight, got: Weight) -> Comparison:
    """want: the source's weight, or the very parts that were to be written."""
    nbytes = sum(part.nbytes for part in jax.tree.leaves(got))
    if is_quantized(want) == is_quantized(got):
        pairs = [("", want, got)] if not is_quantized(want) else _paired(want, got)
        off = [f"{path}{name}: {wrong}" for name, *pair in pairs if (wrong := _bits_differ(*pair))]
        return Comparison("the same bits", nbytes, 0.0, off[0] if off else None)
    if not isinstance(got, QuantizedArray):
        return Comparison("lost", nbytes, 0.0, f"{path}: quantized in the source, and not in the destination")
    worst = _worst(want, got, parameter)
    wrong = None if worst <= 1.0 else f"{path}: {worst:.2f} times the rounding error of {got.format}"
    return Comparison(f"{got.format}, to nearest", nbytes, worst, wrong)


def _paired(want: QuantizedArray, got: QuantizedArray) -> list[tuple[str, Any, Any]]:
    """(name, wanted, stored) of every part."""
    stored = parts_of(got)
    return [(f".{name}", part, stored[name]) for name, part in parts_of(want).items()]


def _bits_differ(want: Any, got: Any) -> str | None:
    """What is different; None if nothing is. NaN is the same as the same NaN."""
    ours, theirs = np.asarray(want), np.asarray(got)
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype} {list(ours.shape)} in the source, {theirs.dtype} {list(theirs.shape)} in the destination"
    bits = np.dtype(f"u{ours.itemsize}")
    count = int(np.count_nonzero(ours.reshape(-1).view(bits) != theirs.reshape(-1).view(bits)))
    return f"{count} of {ours.size} elements differ" if count else None


def _worst(want: Weight, got: QuantizedArray, parameter: Parameter) -> float:
    """The largest difference as a share of what is allowed; of experts one is made a float at a time."""
    if parameter.batch:
        each = (jax.tree.map(lambda part: part[number], got) for number in range(parameter.shape[0]))  # noqa: B023
        return max(_worst(exact, one, parameter.one) for exact, one in zip(want, each, strict=True))
    exact = jnp.asarray(want, jnp.float32)
    return float(jnp.max(jnp.abs(restored(got, parameter) - exact) / _allowed(got, exact, parameter)))


def _allowed(weight: QuantizedArray, exact: jax.Array, parameter: Parameter) -> jax.Array:
    """How far each element may be off, in the shape of the parameter; above 0."""
    inputs = weight.inputs // weight.scales.shape[-1] if weight.format == "int4" else weight.inputs
    scales = weight.scales if weight.format == "int4" else weight.scales[..., None]
    each = jnp.repeat(scales.astype(jnp.float32), inputs, axis=-1)
    each = jnp.moveaxis(each, -1, 0).reshape(parameter.shape)
    if weight.format == "fp8":  # 3 bits of mantissa, and subnormal numbers in steps of 2 ** -9
        each = jnp.maximum(jnp.abs(exact) * 2.0**-4, each * 2.0**-10) * 1.001
    else:
        each = each * STEPS[weight.format]
    return jnp.maximum(each, jnp.finfo(jnp.float32).tiny)


def _forward(before: LayerByLayer, after: LayerByLayer, length: int, same: bool) -> tuple[str, list[str]]:
    """A line about the two distributions, and what is wrong with them. same: whether weights are to be alike."""
    tokens = [(7919 * n + 1) % before.config.vocab_size for n in range(length)]
    want, got = (_logprobs(model, tokens) for model in (before, after))
    largest = float(np.max(np.abs(want - got)))
    if same:
        wrong = [] if largest <= MAX_DIFFERENCE else [f"forward pass: log-probabilities differ by {largest:.2e}"]
        return f"forward pass over {length} tokens: max |Δlogprob| {largest:.1e}", wrong
    divergence = float(np.sum(np.exp(want) * (want - got), axis=-1).mean())
    wrong = [] if np.isfinite(divergence) else ["forward pass: log-probabilities are not finite"]
    return f"forward pass over {length} tokens: mean KL {divergence:.2e}", wrong


def _logprobs(model: LayerByLayer, tokens: list[int]) -> np.ndarray:
    """[tokens, vocab] f64"""
    hidden = model.embedded(tokens)
    for layer in range(model.config.num_layers):
        hidden = model.run(layer, model.layer_weights(layer), hidden)
    return np.asarray(jax.nn.log_softmax(model.logits(hidden)), np.float64)
