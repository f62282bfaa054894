"""Attention of one query token per sequence over the pages of its cache."""

from pallas_kernels.paged_decode.api import paged_decode

__all__ = ["paged_decode"]
