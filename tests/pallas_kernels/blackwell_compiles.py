"""Compile what also runs on Blackwell for a B200 that is not there; a process of its own, see `aot.GPUS`.

Prints a JSON object: kernel → registers and spilled bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp

from pallas_kernels.cache_append import cache_append
from pallas_kernels.kv_pages import abstract_pages
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.target import GPUS
from scripts import aot


def main() -> None:
    array, bf16, target = jax.ShapeDtypeStruct, jnp.bfloat16, GPUS["b200"]
    norm = functools.partial(rms_norm, eps=1e-6, target=target, implementation="mosaic")
    found = {"rms_norm": aot.compile_for_gpu(norm, array((64, 8192), bf16), array((8192,), bf16), gpu="b200")[1]}
    append = functools.partial(cache_append, target=target, implementation="mosaic")
    qkv, angles, ids = array((128, 8, 6, 128), bf16), array((128, 64), jnp.float32), array((128,), jnp.int32)
    for dtype in ("bfloat16", "int8"):
        args = qkv, angles, angles, abstract_pages(512, 8, 64, 128, dtype), ids, ids
        found[f"cache_append {dtype}"] = aot.compile_for_gpu(append, *args, gpu="b200", donate_argnums=3)[1]
    print(json.dumps({name: [dataclasses.asdict(kernel) for kernel in kernels] for name, kernels in found.items()}))


if __name__ == "__main__":
    main()
