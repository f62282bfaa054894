"""Compiling ahead of time: in parallel, with a progress bar, kept on disk for the next start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jaxinfer.folders import cache_folder

if TYPE_CHECKING:
    import jax


def enable_cache() -> None:
    """Keep compiled programs on disk, small and quick ones too. A folder that JAX was already given is left alone."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def temporary_bytes(compiled: Any) -> int:
    """Bytes a compiled program needs on one device besides its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def output_bytes(compiled: Any) -> int:
    """Bytes of results on one device that do not take the place of a donated argument."""
    memory = compiled.memory_analysis()
    return memory.output_size_in_bytes - memory.alias_size_in_bytes


def compile_all(lower: Sequence[Callable[[], jax.stages.Lowered]], progress: bool) -> list[Any]:
    """Trace and compile each; results in the same order. Tracing holds the interpreter lock, compiling does not."""
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    try:
        futures = [pool.submit(lambda trace: trace().compile(), trace) for trace in lower]
        for future in tqdm(as_completed(futures), "Compiling", len(futures), unit="program", disable=not progress):
            future.result()
        return [future.result() for future in futures]
    finally:  # an error, or Ctrl-C, does not wait for the programs still queued
        pool.shutdown(wait=False, cancel_futures=True)
