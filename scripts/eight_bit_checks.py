"""Small cases of what runs with `quantize_activations`, for `kernel_checks.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats import ROW_DTYPES, QuantizedArray, QuantizedRows, RowFormat, dequantize, quantize
from pallas_kernels.fused_mlp import gate_up
from pallas_kernels.fused_mlp import reference as mlp_reference
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quantize_rows import norm_and_quantize_rows, quantize_rows
from pallas_kernels.target import H200
from scripts.check import Check
from scripts.kernels import quant_matmul as products
from scripts.kernels.fused_mlp import normal

EPS = 1e-5


def checks() -> list[Check]:
    return [*both_in_8_bits(), *quantized_rows()]


def both_in_8_bits() -> list[Check]:
    """Held to the product of what x is rounded to: no error but the sum's. Few outputs: of one device of several."""

    def check(format: RowFormat, rows: int, inputs: int, outputs: int | tuple[int, int]) -> Check:
        shape = outputs if isinstance(outputs, tuple) else (outputs,)

        def make(key: jax.Array) -> tuple[Any, ...]:
            weight = quantize(normal(key, inputs, *shape, size=inputs**-0.5), format)
            x = normal(jax.random.fold_in(key, 1), rows, inputs)
            return quantize_rows(x * jnp.logspace(-2, 2, rows, dtype=x.dtype)[:, None], format), weight

        def reference(x: QuantizedRows, weight: QuantizedArray) -> jax.Array:
            wide = x.values.astype(jnp.float32) * x.scales[:, None]
            if len(shape) == 2:
                weights = jnp.moveaxis(dequantize(weight, jnp.float32), -1, 0)
                return mlp_reference.gate_up(wide, weights, activation="silu")
            return products.reference(wide, weight)

        kernel = functools.partial(quant_matmul, target=H200, implementation="mosaic")
        if len(shape) == 2:
            kernel = functools.partial(gate_up, activation="silu", target=H200, implementation="mosaic")
        name = f"quant_matmul {format} both {inputs}x{'x'.join(map(str, shape))} rows={rows}"
        return Check(name, make, kernel, reference, 5e-3)

    every = [check(format, rows, 1024, 1536) for format in ROW_DTYPES for rows in (1, 7, 8, 9, 64, 65, 130, 256, 300)]
    every += [check(format, rows, 4096, 512) for format in ROW_DTYPES for rows in (3, 48)]
    every += [check(format, rows, 14336, 4096) for format in ROW_DTYPES for rows in (16, 256)]
    every += [check(format, rows, 4096, (2, 1792)) for format in ROW_DTYPES for rows in (1, 64, 200)]
    return every


def quantized_rows() -> list[Check]:
    """Read back, plain and behind a norm; held to what was not rounded: half a step, at most, of each element."""

    def read(rows: QuantizedRows) -> jax.Array:
        return rows.values.astype(jnp.float32) * rows.scales[:, None]

    def inputs(key: jax.Array, rows: int, width: int, dtype: str) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        x, delta = (3 * jax.random.normal(each, (rows, width), dtype) for each in keys[:2])
        return x, delta, 1 + 0.2 * jax.random.normal(keys[2], (width,), dtype)

    def both(x: jax.Array, delta: jax.Array, scale: jax.Array, format: RowFormat) -> tuple[jax.Array, ...]:
        options: dict[str, Any] = {"format": format, "target": H200, "implementation": "mosaic"}
        total, normed = norm_and_quantize_rows(x, delta, scale, eps=EPS, **options)
        _, alone = norm_and_quantize_rows(x, None, scale, eps=EPS, **options)
        return read(quantize_rows(x, **options)), total, read(normed), read(alone)

    def reference(x: jax.Array, delta: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        first, second, factor = (y.astype(jnp.float32) for y in (x, x + delta, scale))
        alone, normed = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPS) * factor for y in (first, second))
        return first, second, normed, alone

    sizes = ((1, 4096, "bfloat16"), (77, 1792, "float16"), (300, 14336, "bfloat16"), (5, 1536, "bfloat16"))
    return [
        Check(
            f"quantize_rows {format} {dtype} {rows}x{width}",
            functools.partial(inputs, rows=rows, width=width, dtype=dtype),
            functools.partial(both, format=format),
            reference,
            {"int8": 0.016, "fp8": 0.035}[format],  # int8: steps of 1/25 of a deviation where a row's largest is 5
        )
        for format in ROW_DTYPES
        for rows, width, dtype in sizes
    ]
