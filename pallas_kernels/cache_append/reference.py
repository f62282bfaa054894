"""What cache_append means: numpy, float32, one vector at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def normalise(x: Array, scale: Array | None, eps: float) -> Array:
    """Zhang & Sennrich 2019. x, scale: [head_dim]."""
    return x if scale is None else x / np.sqrt(np.mean(x * x) + np.float32(eps)) * scale


def rotate(x: Array, cos: Array | None, sin: Array | None, interleaved: bool) -> Array:
    """Su et al. 2021. x: [head_dim]; cos, sin: [pairs]; dimension i turns with i + pairs, or 2i with 2i + 1."""
    if cos is None or sin is None:
        return x
    out, pairs = x.copy(), len(cos)
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        out[a] = x[a] * cos[i] - x[b] * sin[i]
        out[b] = x[b] * cos[i] + x[a] * sin[i]
    return out


def quantize(x: Array, dtype: Any) -> tuple[NDArray[Any], np.float32]:
    """x: [head_dim] as `dtype` times a scale."""
    dtype = np.dtype(dtype)
    scale = np.float32(np.abs(x).max() / LARGEST[dtype.name])
    stored = x / (scale or np.float32(1))
    return (np.rint(stored) if dtype == np.int8 else stored).astype(dtype), scale


def cache_append(
    qkv: NDArray[Any],
    cos: Array | None,
    sin: Array | None,
    k_pages: NDArray[Any],
    v_pages: NDArray[Any],
    k_scales: Array | None,
    v_scales: Array | None,
    page_ids: NDArray[np.int32],
    offsets: NDArray[np.int32],
    *,
    v_transposed: bool = False,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    norm_eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Array, NDArray[Any], NDArray[Any], Array | None, Array | None]:
    """Shapes as in `api.cache_append`; returns q, k_pages, v_pages, k_scales and v_scales, all new."""
    wide = np.asarray(qkv, np.float32)
    q, k_pages, v_pages = wide[:, :, :-2].copy(), k_pages.copy(), v_pages.copy()
    if k_scales is not None and v_scales is not None:
        k_scales, v_scales = k_scales.copy(), v_scales.copy()
    for token, head in np.ndindex(*q.shape[:2]):
        cos_t, sin_t = (None, None) if cos is None or sin is None else (cos[token], sin[token])
        for i in range(q.shape[2]):
            q[token, head, i] = rotate(normalise(q[token, head, i], q_norm, norm_eps), cos_t, sin_t, interleaved)
        page, offset = page_ids[token], offsets[token]
        if page >= len(k_pages):
            continue
        k = rotate(normalise(wide[token, head, -2], k_norm, norm_eps), cos_t, sin_t, interleaved)
        v = wide[token, head, -1]
        if k_scales is not None and v_scales is not None:
            k, k_scales[page, head, offset] = quantize(k, k_pages.dtype)
            v, v_scales[page, head, offset] = quantize(v, v_pages.dtype)
        k_pages[page, head, offset] = k
        v_pages[(page, head, slice(None), offset) if v_transposed else (page, head, offset)] = v
    return q, k_pages, v_pages, k_scales, v_scales
