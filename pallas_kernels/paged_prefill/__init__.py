"""Causal attention of ragged chunks of several sequences over their pages."""

from pallas_kernels.paged_prefill.api import paged_prefill

__all__ = ["paged_prefill"]
