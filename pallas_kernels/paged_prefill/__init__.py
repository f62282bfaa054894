"""Causal attention of ragged chunks of several sequences over their pages."""

from pallas_kernels.paged_prefill.api import obstacle, paged_prefill
from pallas_kernels.paged_prefill.plan import Plan, make_plan

__all__ = ["Plan", "make_plan", "obstacle", "paged_prefill"]
