"""GPTQ (Frantar et al. 2022): 4-bit weights rounded so that a layer's outputs, not its weights, stay close.

Inputs are rounded one after the other, and the inputs that are still to come make up for the error of each as far as
they go together with it in the calibration data. Where they do not, H being diagonal, this is rounding to nearest.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxinfer.config import Quantization
from pallas_kernels.formats import QuantizedArray, pack_int4, quantize

BLOCK = 128
"""Inputs whose errors reach the inputs after them in one product."""
DAMPING = (0.01, 0.1, 1.0)
"""Added to H's diagonal, in units of its mean: the first with which H can be inverted. The paper takes 0.01."""
SHRINKS = tuple(1.0 - 0.025 * step for step in range(13))
"""Candidate ranges of a group of weights, as shares of its largest."""


def gptq(
    weight: jax.Array, second_moment: jax.Array, quantization: Quantization, shrinks: tuple[float, ...] = SHRINKS
) -> QuantizedArray:
    """weight: [inputs, outputs], in the dtype of the activations; second_moment: [inputs, inputs] f32, the mean of
    x xᵀ over the projection's inputs x; quantization: int4 with a group size. Returns values [outputs, inputs / 2].

    shrinks: the scale of a group is the one of these shares of its largest weight's that makes the least error when
    weights are rounded to nearest. Raises ValueError for second moments that are not finite.
    """
    assert quantization.group_size is not None
    moments = jnp.asarray(second_moment, jnp.float32)
    factor = _inverse_factor(moments)
    candidates = jnp.asarray(shrinks, jnp.float32)
    return _quantize(weight, moments, factor, candidates, quantization.group_size, quantization.symmetric)


@functools.partial(jax.jit, donate_argnums=0)
def add_moments(total: jax.Array, x: jax.Array) -> jax.Array:
    """total, [inputs, inputs] f32, and the sum of x xᵀ over the rows of x: [rows, inputs] f32."""
    return total + jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _quantize(
    weight: jax.Array, moments: jax.Array, factor: jax.Array, shrinks: jax.Array, group: int, symmetric: bool
) -> QuantizedArray:
    """factor: as `_inverse_factor` gives it."""
    scales, zeros = _best_scales(weight, jnp.diagonal(moments), group, symmetric, shrinks)
    order, wide = _order(moments), weight.astype(jnp.float32)
    grid = (jnp.broadcast_to(_of_inputs(part, group), wide.shape)[order] for part in (scales, zeros))
    rounded = _round_in_turn(wide[order], factor, *grid)
    values = jnp.zeros_like(rounded).at[order].set(rounded)
    return QuantizedArray(pack_int4(values.T), scales, zeros, "int4", group)


def _order(moments: jax.Array) -> jax.Array:
    """Inputs in their order of rounding: the largest first, while all others can still make up for them."""
    return jnp.argsort(-jnp.diagonal(moments), stable=True)


def _of_inputs(parts: jax.Array | None, group: int) -> jax.Array:
    """[inputs, outputs] f32 from [outputs, groups]; 0 for zero points that there are not."""
    if parts is None:
        return jnp.zeros((1, 1), jnp.float32)
    return jnp.repeat(parts.T.astype(jnp.float32), group, axis=0)


def _to_grid(weight: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    """The nearest value in -8..7; all of one shape, f32."""
    return jnp.clip(jnp.round(weight / scales + zeros), -8, 7)


def _best_scales(
    weight: jax.Array, importance: jax.Array, group: int, symmetric: bool, shrinks: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Scales and zero points, [outputs, groups]: for each group those that make the least error among the candidates.

    importance: [inputs] f32, the mean square of each.
    """
    wide = weight.astype(jnp.float32)
    grouped = wide.reshape(-1, group, wide.shape[1])
    low, high = jnp.minimum(grouped.min(1, keepdims=True), 0.0), jnp.maximum(grouped.max(1, keepdims=True), 0.0)
    if symmetric:
        high = jnp.maximum(-low, high)
        low = -high
    type Candidate = tuple[jax.Array, jax.Array | None]

    def candidate(shrink: jax.Array) -> tuple[Candidate, jax.Array]:
        """And its error, [outputs, groups]."""
        clipped = jnp.clip(grouped, low * shrink, high * shrink).reshape(wide.shape).astype(weight.dtype)
        made = quantize(clipped, "int4", group_size=group, symmetric=symmetric)
        scales, zeros = _of_inputs(made.scales, group), _of_inputs(made.zeros, group)
        off = (_to_grid(wide, scales, zeros) - zeros) * scales - wide
        return (made.scales, made.zeros), jnp.sum((off * off * importance[:, None]).reshape(grouped.shape), axis=1).T

    def compare(best: tuple[Candidate, jax.Array], shrink: jax.Array) -> tuple[tuple[Candidate, jax.Array], None]:
        (old, least), (new, error) = best, candidate(shrink)
        better = error < least
        return (jax.tree.map(functools.partial(jnp.where, better), new, old), jnp.where(better, error, least)), None

    ((scales, zeros), _), _ = jax.lax.scan(compare, candidate(shrinks[0]), shrinks[1:])
    return scales, zeros


def _inverse_factor(moments: jax.Array) -> jax.Array:
    """The upper triangular U with Uᵀ U the inverse of the damped moments, in `_order`. Raises ValueError for none."""
    for damping in DAMPING:
        factor, is_finite = _factor(moments, jnp.float32(damping))
        if is_finite:
            return factor
    raise ValueError(
        "the second moments of a projection's inputs cannot be inverted: its inputs are not finite, or hardly differ; "
        "check the checkpoint, or give more text"
    )


@jax.jit
def _factor(moments: jax.Array, damping: jax.Array) -> tuple[jax.Array, jax.Array]:
    """And whether it is finite. damping: in units of the diagonal's mean.

    With rows and columns reversed, a Cholesky factor of the moments themselves gives one of their inverse.
    """
    order = _order(moments)
    diagonal = jnp.diagonal(moments)
    # An input that was always zero says nothing: it is rounded alone.
    added = jnp.where(diagonal == 0.0, 1.0, damping * jnp.mean(diagonal))
    damped = (moments + jnp.diag(added))[order][:, order]
    lower = jnp.linalg.cholesky(damped[::-1, ::-1])
    factor = jax.scipy.linalg.solve_triangular(lower, jnp.eye(len(damped)), lower=True)[::-1, ::-1]
    return factor, jnp.isfinite(jnp.sum(factor))


def _round_in_turn(weight: jax.Array, factor: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    """[inputs, outputs] int8 in -8..7. weight, scales, zeros: [inputs, outputs] f32, in the order of rounding;
    factor: [inputs, inputs], of the inverse second moments, upper triangular.
    """
    inputs, outputs = weight.shape
    size = math.gcd(inputs, BLOCK)

    def block(start: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, values = carry
        rows = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        ours = rows(factor)
        triangle = rows(ours.T).T
        mine, own_scales, own_zeros = rows(left), rows(scales), rows(zeros)

        def one(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            mine, errors, rounded = state
            value = _to_grid(mine[i], own_scales[i], own_zeros[i])
            error = (mine[i] - (value - own_zeros[i]) * own_scales[i]) / triangle[i, i]
            return mine - triangle[i][:, None] * error, errors.at[i].set(error), rounded.at[i].set(value)

        empty = jnp.zeros((size, outputs), jnp.float32)
        _, errors, rounded = jax.lax.fori_loop(0, size, one, (mine, empty, empty))
        after = jnp.where(jnp.arange(inputs) >= start + size, ours, 0.0)  # [size, inputs]
        left = left - jnp.matmul(after.T, errors, precision=jax.lax.Precision.HIGHEST)
        return left, jax.lax.dynamic_update_slice_in_dim(values, rounded.astype(jnp.int8), start, 0)

    carry = weight, jnp.zeros(weight.shape, jnp.int8)
    return jax.lax.fori_loop(0, inputs // size, lambda n, carry: block(n * size, carry), carry)[1]
