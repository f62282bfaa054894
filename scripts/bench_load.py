"""How fast weights come from the disk to the devices, beside reading the same files and nothing else.

    python scripts/bench_load.py [--gigabytes 2] [--tensor 1] [--turns 3] [--warm] [--convert] [--native]
                                  [--folder ON_THAT_DISK]

writes a sharded Hugging Face checkpoint in bfloat16, times both in turns, prints the best of each and their ratio, and
how much of the host's memory loading took at most (on a CPU the weights are part of it), and removes the checkpoint.
Before each turn the files leave the page cache, unless `--warm`. With `--convert` it times `python -m convert` to the
native format instead, once, and prints the memory that its process held at most; with `--native` it does so first, and
then loads what was made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import convert
from convert.safetensors_writer import Outgoing, write
from jaxinfer.parameters import for_tensor_parallel
from jaxinfer.weights import abstract_weights
from meshes import build_mesh

ROOT = Path(__file__).resolve().parent.parent
# Not the maximum that the system keeps for children: it counts a process from its fork, as large as whoever forked.
_CONVERT = """
import sys
from convert.__main__ import main
from scripts.bench_load import host_memory
try:
    main()
finally:
    print(host_memory("VmHWM"), file=sys.stderr)
"""
_BLOCK_BYTES = 8 << 20
_SHARD_BYTES = 512 << 20


def config_of(nbytes: float) -> dict[str, Any]:
    """The config.json of a llama of about that size, in bfloat16: as wide as a 7B model's if that leaves two layers."""
    hidden = next((size for size in (4096, 2048, 1024, 512) if nbytes > 4 * (12 * size * size * 2)), 256)
    mlp, vocab = hidden * 11 // 4, hidden * 8
    layer = 2 * (hidden * hidden * 5 // 2 + 3 * hidden * mlp)
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": max(1, round((nbytes - 2 * 2 * vocab * hidden) / layer)),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "torch_dtype": "bfloat16",
    }


def shapes_of(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, as Hugging Face names them."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            rows = hidden if name in "qo" else hidden // 4
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (mlp, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (mlp, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, mlp)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write_checkpoint(folder: Path, nbytes: float) -> list[Path]:
    """Returns the weights' files, which are on the disk then, and not only in its cache."""
    config = config_of(nbytes)
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(ml_dtypes.bfloat16)

    def tensor(name: str, shape: tuple[int, ...]) -> Outgoing:
        sizes = [min(noise.size, math.prod(shape) - start) for start in range(0, math.prod(shape), noise.size)]
        return Outgoing(name, shape, "BF16", lambda: (noise[:size] for size in sizes))

    write(folder, [tensor(*each) for each in shapes_of(config)], _SHARD_BYTES, lambda nbytes: None)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    return files


def sequential(files: list[Path]) -> None:
    """Read them from end to end."""
    block = bytearray(_BLOCK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                continue


def load(folder: Path, tensor: int) -> None:
    """The checkpoint onto the first devices, in the dtype in which it is stored."""
    checkpoint = convert.open_checkpoint(folder)
    mesh, physical = build_mesh(tensor=tensor), for_tensor_parallel(checkpoint.config, tensor)
    weights = convert.load(
        checkpoint, abstract_weights(physical, np.dtype(ml_dtypes.bfloat16), mesh, None), physical, progress=False
    )
    jax.block_until_ready(weights)


def forget(files: list[Path]) -> None:
    """Take the files out of the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def host_memory(what: str) -> int:
    """Bytes of this process's memory: "VmRSS", now, or "VmHWM", at most until now."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of weights, about")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share them")
    parser.add_argument("--turns", type=int, default=3, help="of each")
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--convert", action="store_true", help="to the native format, instead of loading")
    parser.add_argument("--native", action="store_true", help="load what it is converted to")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the system's for such files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        source = Path(made) / "source"
        source.mkdir()
        files = write_checkpoint(source, args.gigabytes * 1e9)
        if args.convert or args.native:
            native = convert_once(source, files)
        if args.native:
            os.sync()
            measure(native, [file for file in native.rglob("*") if file.is_file()], args)
        elif not args.convert:
            measure(source, files, args)


def convert_once(folder: Path, files: list[Path]) -> Path:
    """Print the seconds of one conversion, and the most memory that its process held: code, libraries and all."""
    total = sum(file.stat().st_size for file in files)
    forget(files)
    command = [sys.executable, "-c", _CONVERT, str(folder), str(folder.parent / "native")]
    result: list[subprocess.CompletedProcess[str]] = []
    seconds = timed(lambda: result.append(subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)))
    *messages, peak = result[0].stderr.splitlines()
    if result[0].returncode:
        sys.exit("\n".join(messages))
    print(f"{total / 1e9:.3f} GB in {len(files)} files, converted in {seconds:.1f} s; {int(peak) / 1e6:.0f} MB at most")
    return folder.parent / "native"


def measure(folder: Path, files: list[Path], args: argparse.Namespace) -> None:
    total = sum(file.stat().st_size for file in files)
    works = {"read": lambda: sequential(files), "load": lambda: load(folder, args.tensor)}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[0]))  # a GPU's driver and libraries
    before = host_memory("VmRSS")
    for _ in range(args.turns):
        for name, work in works.items():
            (sequential if args.warm else forget)(files)
            seconds[name].append(timed(work))
    cache, kind = "warm" if args.warm else "cold", jax.devices()[0].device_kind
    print(f"{total / 1e9:.3f} GB in {len(files)} files, {cache}; {args.tensor} x {kind}, {os.cpu_count()} cores")
    for name, each in seconds.items():
        print(f"{name:<5} {total / 1e9 / min(each):7.3f} GB/s  ({', '.join(f'{s:.2f}' for s in each)} s)")
    print(f"load / read: {min(seconds['read']) / min(seconds['load']):.2f}")
    above = max(0, host_memory("VmHWM") - before)
    print(f"host memory: {above / 1e6:.0f} MB at most above the {before / 1e6:.0f} MB before loading")


if __name__ == "__main__":
    main()
