"""Activations in 8 bits, a scale per row, of what is given or of its norm."""

from pallas_kernels.quantize_rows.api import norm_and_quantize_rows, quantize_rows

__all__ = ["norm_and_quantize_rows", "quantize_rows"]
