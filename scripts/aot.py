"""Compile for H100, H200 and B200 on a machine that has no GPU, and read what the compiler says of each kernel.

Needs the `aot` extra (the CUDA plugin of jax and nvcc; no GPU, driver, cuBLAS or cuDNN):

    compiled, kernels = compile_for_gpu(fn, jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16), gpu="h200")

Nothing is autotuned and nothing runs. `save` writes an executable that `load` runs on the GPU it was compiled for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SPECS = Path(__file__).parent / "specs"
GPUS = ("h100", "h200", "b200")
"""A process compiles Mosaic kernels for one architecture only, Hopper or Blackwell: the first one stays."""
_PRODUCT = re.compile(r"wgmma\.mma_async\S*\s*\{([^}]*)\}")
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned (\d+)")
_REGISTER = re.compile(r"%[a-z]+\d+")


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one Mosaic kernel."""

    registers: int
    """A thread; two blocks of 256 threads share an SM only up to 128."""
    spilled_bytes: int


def gpu_mesh(gpu: str = "h200", devices: int = 1, axes: tuple[str, ...] = ("tensor",)) -> Mesh:
    """A mesh of GPUs that are not there, all along the first axis. gpu: one of GPUS."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=(SPECS / f"{gpu}.txtpb").read_text(), topology=f"1x1x{devices}"
        )
    except NotImplementedError as error:  # jax has not loaded its CUDA plugin
        raise RuntimeError("compiling for a GPU needs the `aot` extra, and without a GPU JAX_PLATFORMS=cpu") from error
    return Mesh(np.array(topology.devices).reshape((devices,) + (1,) * (len(axes) - 1)), axes)


def compile_for_gpu(
    fn: Callable[..., Any], *args: Any, gpu: str = "h200", donate_argnums: tuple[int, ...] = ()
) -> tuple[jax.stages.Compiled, list[Kernel]]:
    """Compile `fn` for one GPU. args: pytrees of ShapeDtypeStruct. Not for several threads at once."""
    replicated = NamedSharding(gpu_mesh(gpu), PartitionSpec())
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), args)
    lowered = jax.jit(fn, donate_argnums=donate_argnums).lower(*args)
    with mosaic_dump() as folder, _uncached():
        compiled = lowered.compile()
        kernels = [parse_ptxas(path.read_text()) for path in sorted(folder.glob("*.ptxas"))]
    return compiled, kernels


@contextlib.contextmanager
def mosaic_dump() -> Iterator[Path]:
    """Mosaic writes its PTX, and what ptxas says of it, into this folder; nvcc is found where pip puts it.

    Raises RuntimeError if a kernel compiled meanwhile has `early_reads`.
    """
    found = importlib.util.find_spec("nvidia")
    if found is None or found.submodule_search_locations is None:
        raise RuntimeError("compiling for a GPU needs nvcc: pip install 'jaxinfer[aot]'")
    old = {name: os.environ.get(name) for name in ("PATH", "MOSAIC_GPU_DUMP_TO")}
    binaries = [str(Path(root) / "cu13" / "bin") for root in found.submodule_search_locations]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PATH"] = os.pathsep.join([*binaries, old["PATH"] or ""])
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield Path(folder)
            for path in Path(folder).glob("*.ptx"):
                if early := early_reads(path.read_text()):
                    raise RuntimeError(f"{path.stem} reads sums that the matrix units have not written yet: {early[0]}")
        finally:
            for name, value in old.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """No program is kept in the persistent cache: JAX cannot read back one for a GPU that is not here."""
    name = "jax_persistent_cache_min_compile_time_secs"
    old = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, old)


def parse_ptxas(text: str) -> Kernel:
    """The numbers in what `ptxas -v` prints."""
    registers = re.search(r"Used (\d+) registers", text)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    if registers is None or not spilled:
        raise RuntimeError(f"cannot read what ptxas printed: {text}")
    return Kernel(int(registers[1]), sum(map(int, spilled)))


def early_reads(ptx: str) -> list[str]:
    """Instructions that read the sums of a wgmma before it is waited for, in the order of the text.

    LLVM sees no connection between the wait and the registers: it may move arithmetic on them before it.
    """
    begun: set[str] = set()
    groups: list[set[str]] = []
    found = []
    for line in ptx.splitlines():
        if product := _PRODUCT.search(line):
            begun |= set(_REGISTER.findall(product[1]))
        elif "wgmma.commit_group" in line:
            groups.append(begun)
            begun = set()
        elif wait := _WAIT.search(line):
            groups = groups[max(0, len(groups) - int(wait[1])) :]
        else:
            registers = _REGISTER.findall(line)
            # The first is what an instruction writes, except where it stores or jumps.
            read = registers if line.lstrip().startswith(("st.", "red.", "@", "{")) else registers[1:]
            if begun.union(*groups) & set(read):
                found.append(line.strip())
    return found


def save(compiled: jax.stages.Compiled, path: Path) -> None:
    """Write an executable for `load`; it holds no weights."""
    path.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))


def load(path: Path) -> jax.stages.Compiled:
    """An executable of `save`, on this machine's first GPU. It is unpickled: read only files you wrote."""
    import jax.experimental.pallas.mosaic_gpu  # loads the library whose symbols an executable asks for

    stored = pickle.loads(path.read_bytes())
    return serialize_executable.deserialize_and_load(*stored, execution_devices=jax.devices()[:1])
