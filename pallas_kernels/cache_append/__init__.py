"""RoPE on queries and keys, then keys and values into their pages."""

from pallas_kernels.cache_append.api import cache_append

__all__ = ["cache_append"]
