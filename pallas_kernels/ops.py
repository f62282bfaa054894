"""The operations, and whether their kernels run on a kind of device."""

from __future__ import annotations

import importlib

from pallas_kernels.target import Target

OPS = ("cache_append", "fused_mlp", "moe", "paged_decode", "paged_prefill", "quant_matmul")
"""Each is a folder here."""


def obstacle(op: str, target: Target) -> str | None:
    """Why the kernel of `op` runs for no shapes and dtypes on `target`; None: it does for those it was written for."""
    reason: str | None = importlib.import_module(f"pallas_kernels.{op}.api").obstacle(target)
    return reason
