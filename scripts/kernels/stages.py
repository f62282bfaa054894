"""The programs of a case, as functions and shapes: compiled here, or ahead on a machine without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from scripts import aot
from scripts.kernels.common import Case

KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
"""The data of a PRNG key; typed keys do not survive serialization."""
ROOT = Path(__file__).parent.parent.parent
MANIFEST = "manifest.json"

type Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Stage:
    """One program to compile."""

    case: Case
    name: str
    """"inputs", "reference", and of each program P: "prepare P", "P" and "check P"."""
    fn: Callable[..., Any]
    shapes: Callable[[], tuple[Any, ...]]
    """Its arguments as ShapeDtypeStructs. Called only to compile: tracing cuDNN's attention takes a GPU."""
    donated: tuple[int, ...] = ()
    ahead: bool = True
    """Whether it may be compiled without the GPU."""

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.=]+", "-", f"{self.case.full_name} {self.name}") + ".bin"

    def compile(self) -> Compiled:
        """For this machine."""
        return jax.jit(self.fn, donate_argnums=self.donated).lower(*self.shapes()).compile()


def stages(case: Case) -> Iterator[Stage]:
    """Every program that measuring the case takes."""

    def inputs(key_data: jax.Array) -> tuple[Any, ...]:
        return case.inputs(jax.random.wrap_key_data(key_data))

    shapes = jax.eval_shape(inputs, KEY)
    yield Stage(case, "inputs", inputs, lambda: (KEY,))
    yield Stage(case, "reference", case.reference, lambda: shapes)
    for name, program in case.programs.items():
        args = shapes
        if program.prepare is not None:
            args = jax.eval_shape(program.prepare, *shapes)
            yield Stage(case, f"prepare {name}", program.prepare, lambda: shapes)
        ahead = not program.autotuned
        yield Stage(case, name, program.fn, lambda args=args: args, tuple(program.in_place), ahead)

        def check(computed: Any, expected: Any, result: Callable[[Any], Any] | None = program.result) -> jax.Array:
            return row_error(computed if result is None else result(computed), expected)

        def outputs(fn: Callable[..., Any] = program.fn, args: Any = args) -> tuple[Any, ...]:
            return jax.eval_shape(fn, *args), jax.eval_shape(case.reference, *shapes)

        yield Stage(case, f"check {name}", check, outputs, ahead=ahead)


def row_error(computed: Any, expected: Any) -> jax.Array:
    """The largest of |computed - expected| / |expected| over the rows of all leaves, [] f32; NaN if anything is NaN.

    Raises ValueError if structures or shapes differ.
    """
    if jax.tree.structure(computed) != jax.tree.structure(expected):
        raise ValueError(f"the program returns {jax.tree.structure(computed)}, not {jax.tree.structure(expected)}")

    def leaf_error(computed: jax.Array, expected: jax.Array) -> jax.Array:
        if computed.shape != expected.shape:
            raise ValueError(f"the program returns {computed.shape} where the reference has {expected.shape}")
        wide = jnp.atleast_1d(expected).astype(jnp.float32)
        distance = jnp.linalg.norm(jnp.atleast_1d(computed).astype(jnp.float32) - wide, axis=-1)
        return jnp.max(jnp.where(distance == 0.0, 0.0, distance / jnp.linalg.norm(wide, axis=-1)), initial=0.0)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(leaf_error, computed, expected))))


def compile_ahead(cases: Iterable[Case], folder: Path, gpu: str) -> None:
    """Compile for a GPU that is not here, save into `folder`, and say what ptxas made of each kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    if manifest.exists() and json.loads(manifest.read_text()) != _origin(gpu):
        raise ValueError(f"{folder} holds executables of other sources; name an empty folder")
    manifest.write_text(json.dumps(_origin(gpu)))
    for stage in (stage for case in cases for stage in stages(case)):
        if stage.ahead:
            compiled, kernels = aot.compile_for_gpu(stage.fn, *stage.shapes(), gpu=gpu, donate_argnums=stage.donated)
            aot.save(compiled, folder / stage.file_name)
            used = ", ".join(
                f"{kernel.registers} registers, {kernel.spilled_bytes} bytes spilled" for kernel in kernels
            )
            print(f"{stage.case.full_name}: {stage.name}" + (f": {used}" if used else ""), flush=True)


def compile_here(cases: Iterable[Case], folder: Path | None, gpu: str) -> Mapping[tuple[str, str], Compiled]:
    """(Case, stage) → program, in parallel; loaded where `folder` has it. A stage that fails raises when it is called.

    Raises ValueError if the executables in `folder` are of other sources, of another jax or for another GPU.
    """
    if folder is not None and json.loads((folder / MANIFEST).read_text()) != _origin(gpu):
        raise ValueError(f"the executables in {folder} are not of these sources for this GPU; compile them again")

    def make(stage: Stage) -> Compiled:
        path = None if folder is None else folder / stage.file_name
        try:
            return aot.load(path) if path is not None and path.exists() else stage.compile()
        except Exception as error:
            return _raiser(error)

    todo = [stage for case in cases for stage in stages(case)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(make, todo)
        return {(stage.case.full_name, stage.name): program for stage, program in zip(todo, made, strict=True)}


def _raiser(error: Exception) -> Compiled:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def _origin(gpu: str) -> dict[str, str]:
    """What executables depend on."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("pallas_kernels/**/*.py"), *ROOT.glob("scripts/kernels/*.py")]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return {"gpu": gpu, "jax": jax.__version__, "sources": digest.hexdigest()}
