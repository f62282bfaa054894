"""Activations times a weight stored in 8 or 4 bits."""

from pallas_kernels.quant_matmul.api import quant_matmul

__all__ = ["quant_matmul"]
