"""Time of an engine's steps on one GPU, with random weights: decode and prefill, and what the time goes to.

    python scripts/bench_step.py [--config llama-3-8b] [--batches 1,32,128,256] [--context 640] [--prefill 2048]
        [--quantization int8] [--quantize-activations] [--kv-cache-dtype int8] [--layers N] [--untimed] [--profile]
        [--json FILE]

Milliseconds from one step to the next with the host running ahead, how long the host takes to dispatch one, and the
share of the read ceiling (measured in the same run) that reading the weights and the cache once would take. With
--profile, which kernels the time goes to, of a program without CUDA graphs. --layers: a shallower model, to try things.
--untimed: with kernels that no measurement has shown to be faster yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer import compilation
from jaxinfer.config import Quantization
from jaxinfer.presets import PRESETS
from jaxinfer.weights import size_in_bytes
from meshes import build_mesh
from scripts.device_time import read_ceiling
from scripts.step_timing import StepBench

STEPS = 50
MOST_KERNELS = 14
"""Of a profile, that are printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama-3-8b", choices=sorted(PRESETS))
    parser.add_argument("--batches", default="1,32,128,256", help="decoding sequences")
    parser.add_argument("--context", type=int, default=640, help="tokens in the cache of each")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a prompt; 0: no prefill")
    parser.add_argument("--quantization", choices=["int8", "fp8", "int4"])
    parser.add_argument("--quantize-activations", action="store_true", help="with int8 or fp8")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8", "fp8"])
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--untimed", action="store_true", help="take kernels that were not timed yet, too")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    compilation.enable_cache()
    ceiling = read_ceiling()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, read ceiling {ceiling / 1e9:.0f} GB/s", flush=True)
    rows = measure(args, ceiling)
    if args.json:
        args.json.write_text(json.dumps({"read_ceiling": ceiling, "steps": rows, "options": str(vars(args))}, indent=1))


def measure(args: argparse.Namespace, ceiling: float) -> list[dict[str, Any]]:
    config = PRESETS[args.config]
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    sizes = [int(size) for size in args.batches.split(",")]
    quantization = Quantization(args.quantization) if args.quantization else None
    prefill = args.prefill or max(sizes)
    settings = args.context, prefill, quantization, args.kv_cache_dtype, args.untimed, args.quantize_activations
    bench = StepBench(config, build_mesh(), max(sizes), *settings)
    batches = {f"decode {size}": bench.decode_batch(size) for size in sizes}
    if args.prefill:
        batches[f"prefill {args.prefill}"] = bench.prefill_batch(args.prefill)
    start = time.perf_counter()
    bench.runner.compile([batch.shape for batch in batches.values()])
    print(f"compiled {len(batches)} programs in {time.perf_counter() - start:.0f} s", flush=True)

    rows = []
    # A step reads one row of the embedding, and all else.
    weights = size_in_bytes(bench.weights) - size_in_bytes(bench.weights["embed"]) * (not config.tied_head)
    cache = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(bench.runner.state.cache))
    per_token = cache / (bench.num_pages * bench.page_size)
    for name, batch in batches.items():
        timed = bench.time(batch, STEPS if batch.shape.decode else STEPS // 5)
        row = {"step": name, **dataclasses.asdict(timed)}
        rate = batch.shape.tokens / timed.step_ms * 1e3
        line = f"{name}: {timed.step_ms:.3f} ms (host {timed.host_ms:.2f}), {rate:.0f} tok/s"
        if batch.shape.decode:
            row["floor_ms"] = (weights + batch.shape.tokens * args.context * per_token) / ceiling * 1e3
            line += f", {row['floor_ms'] / timed.step_ms:.1%} of the read ceiling"
        print(line, flush=True)
        if args.profile:
            row["kernels"] = dict(sorted(bench.profile(batch).items(), key=lambda item: -item[1][0]))
            for kernel, (ms, count) in list(row["kernels"].items())[:MOST_KERNELS]:
                print(f"    {ms:8.3f} ms {count:6.1f} x {kernel[:100]}", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
