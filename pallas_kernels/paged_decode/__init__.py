"""Attention of one query token per sequence over the pages of its cache."""

from pallas_kernels.paged_decode.api import make_plan, paged_decode
from pallas_kernels.paged_decode.config import obstacle

__all__ = ["make_plan", "obstacle", "paged_decode"]
