"""Checks the arguments of rms_norm and picks the implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.rms_norm import kernel, xla
from pallas_kernels.target import CPU, Target

MOST_EMBED = 16384
"""128 elements a thread: a row has to fit in registers."""


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> jax.Array:
    """x / rms(x) · scale over the last dimension, in float32, rounded once (Zhang & Sennrich 2019).

    x: [rows, embed]; scale: [embed]. Returns the shape and dtype of x. Raises ValueError if shapes disagree.
    """
    choice.check_shape("x", x, (None, None))
    choice.check_shape("scale", scale, (x.shape[1],))
    if choice.resolve("rms_norm", implementation, obstacle(x, target)) == "xla":
        return xla.rms_norm(x, scale, eps=eps)
    return kernel.rms_norm(x, None, scale, eps=eps, interpret=interpret)[0]


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    target: Target = CPU,
    implementation: choice.Implementation = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """(x + delta, `rms_norm` of it), the sum rounded before it is normalised. x, delta: [rows, embed] of one dtype.

    Raises ValueError if shapes or dtypes disagree.
    """
    choice.check_shape("x", x, (None, None))
    choice.check_shape("delta", delta, x.shape)
    choice.check_shape("scale", scale, (x.shape[1],))
    if x.dtype != delta.dtype:
        raise ValueError(f"x is {x.dtype} and delta {delta.dtype}; add_rms_norm takes one dtype")
    if choice.resolve("rms_norm", implementation, obstacle(x, target)) == "xla":
        return xla.add_rms_norm(x, delta, scale, eps=eps)
    total, normed = kernel.rms_norm(x, delta, scale, eps=eps, interpret=interpret)
    return total, normed


def obstacle(x: jax.Array, target: Target) -> str | None:
    """Why the kernel cannot run; None if it can, and then it wins."""
    (rows, embed), dtype = x.shape, jnp.dtype(x.dtype)
    if reason := target.lacks_mosaic():
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {dtype.name}; it takes bfloat16 or float16"
    if embed % kernel.STEP or embed > MOST_EMBED:
        return f"a row has {embed} elements; it takes multiples of {kernel.STEP} up to {MOST_EMBED}"
    return None if rows else "there are no rows"
