"""Mixture of experts: each token goes through the few experts it chose, and nothing is computed for the others."""

from pallas_kernels.moe.api import grouped_matmul, moe

__all__ = ["grouped_matmul", "moe"]
