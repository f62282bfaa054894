"""What a norm and the projection behind it compute: float32 throughout. Independent of the other versions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from pallas_kernels.rms_norm import reference
from pallas_kernels.rms_norm.fold import Norm


def normed(x: jax.Array, norm: Norm, project: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """x + norm.delta, and `project` of its norm. project: as in `fused_mlp.reference`, with what it takes besides."""
    wide, scale = np.asarray(x, np.float32), np.asarray(norm.scale, np.float32)
    total = wide if norm.delta is None else wide + np.asarray(norm.delta, np.float32)
    return jax.numpy.asarray(total), project(jax.numpy.asarray(reference.rms_norm(total, scale, eps=norm.eps)))
