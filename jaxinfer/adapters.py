"""Places for LoRA adapters in a model that runs: filled and emptied without a new program."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import convert
from convert.adapters import Adapter, adaptable
from jaxinfer.config import ModelConfig
from jaxinfer.models.lora import factor_axes
from jaxinfer.parameters import Parameter, Tree, declare, flatten, to_physical
from jaxinfer.startup import LoadedModel
from meshes import sharding

RANK = 16
"""Of the places, where no adapter is given that says it."""
_TARGETS = re.compile(r"layers\.\d+\.(attention\.(qkv|out)|mlp\.(gate_up|up|down))")


class Adapters:
    """The adapters of a model by their names, and the arrays that hold their factors."""

    def __init__(
        self,
        source: convert.Checkpoint | ModelConfig,
        physical: ModelConfig,
        weights: Tree,
        mesh: Mesh,
        *,
        dtype: jnp.dtype,
        places: int,
        rank: int,
    ):
        """Put `places` empty places of this rank beside the projections in `weights`, the tree that the steps read.

        physical: the config as laid out for the mesh. Raises ValueError for a model whose projections take none.
        """
        if isinstance(source, ModelConfig):
            raise ValueError("adapters are for a checkpoint, which says what its weights are called, not a ModelConfig")
        if places < 1 or rank < 1:
            raise ValueError(f"max_loras is {places} and max_lora_rank {rank}; each must be at least 1")
        self._config, self._physical, self._weights = source.config, physical, weights
        self._mesh, self._dtype, self.rank = mesh, dtype, rank
        self._sources = adaptable(source, projections(source.config))
        if not self._sources:
            raise ValueError(
                f"no projection of a {source.config.family} model takes adapters that are kept beside it; merge them: "
                "give the adapter's folder as the model"
            )
        self._names: list[str | None] = [None] * places
        self.lock = threading.RLock()
        """Held, no name gets or loses its place."""
        self._loading = threading.Lock()
        laid_out = projections(physical)
        for path, (own, _) in self._sources.items():
            for factor, shape in _shapes(laid_out[path], rank * len(own.names)).items():
                half, name = self._half(path)
                where = sharding(mesh, factor_axes(laid_out[path])[factor])
                half[f"{name}_{factor}"] = _zeros((places, *shape), dtype, where)
        self._write({path: self._nothing(path) for path in self._sources}, 0)  # compiles what `load` needs

    @property
    def names(self) -> list[str]:
        """Of those that are loaded."""
        return [name for name in self._names if name is not None]

    def place(self, name: str) -> int:
        """Raises ValueError if there is no adapter of this name."""
        with self.lock:
            if name not in self.names:
                raise ValueError(f"there is no adapter {name!r}; loaded: {', '.join(self.names) or 'none'}")
            return self._names.index(name)

    def load(self, name: str, folder: Path) -> None:
        """Fill a free place; threads take turns. The name is there once the factors are.

        Raises ValueError if no place is free, and for an adapter that does not fit the model or is not finite.
        """
        with self._loading:
            place = self._free(name)
            factors = Adapter(folder).factors(self._sources, self._config, self.rank)
            laid_out = {path: self._laid_out(path, a, b) for path, a, b in factors}
            for path, pair in laid_out.items():
                if not all(np.isfinite(array).all() for array in pair.values()):
                    raise ValueError(
                        f"{folder} has inf or NaN in {path}, as {self._dtype} and scaled; other requests would compute "
                        "with it too. Repair the adapter, or choose a dtype that holds its values"
                    )
            self._write(laid_out, place)
            with self.lock:
                self._names[place] = name

    def unload(self, name: str) -> None:
        """Free its place; what is there stays until another takes it, and adds nothing to any request."""
        with self.lock:
            self._names[self.place(name)] = None

    def _free(self, name: str) -> int:
        """A place for an adapter of this name. Raises ValueError if there is none, or the name is taken."""
        with self.lock:
            if name in self.names:
                raise ValueError(f"there is an adapter {name!r} already; unload it first, or choose another name")
            if None not in self._names:
                names = ", ".join(self.names)
                raise ValueError(f"all {len(self._names)} places are taken, by {names}; unload one, or raise max_loras")
            return self._names.index(None)

    def _write(self, factors: Mapping[str, Mapping[str, np.ndarray]], place: int) -> None:
        for path, pair in factors.items():
            half, name = self._half(path)
            for factor, array in pair.items():
                stack = half[f"{name}_{factor}"]
                half[f"{name}_{factor}"] = _put(stack.sharding)(stack, array, place)

    def _laid_out(self, path: str, a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
        """In the shapes that the mesh runs, where kv heads may be replicated, and in the dtype."""
        parameter = projections(self._physical)[path]
        b = to_physical(path, b, self._config, self._physical) if path.endswith(".qkv") else b
        with np.errstate(over="ignore"):  # `load` refuses what is infinite then
            a, b = a.astype(self._dtype), b.astype(self._dtype)
        return {"a": a.reshape(-1, *parameter.shape[: parameter.contract]), "b": b}

    def _nothing(self, path: str) -> dict[str, np.ndarray]:
        rows = self.rank * len(self._sources[path][0].names)
        shapes = _shapes(projections(self._physical)[path], rows)
        return {factor: np.zeros(shape, self._dtype) for factor, shape in shapes.items()}

    def _half(self, path: str) -> tuple[Tree, str]:
        """The dict of factors beside a projection, and the projection's name in it."""
        _, layer, half, name = path.split(".")
        return self._weights["layers"][int(layer)][half].setdefault("lora", {}), name


def check_named(lora: Any) -> None:
    """Raises ValueError unless `lora` is names → folders or Hub ids, none of them empty."""
    fits = isinstance(lora, Mapping) and all(isinstance(n, str) and n and str(path) for n, path in lora.items())
    if not fits:
        raise ValueError(f"lora is {lora!r}; it must be a dict of names and folders or Hub ids, as {{name: folder}}")


def load_adapters(
    source: convert.Checkpoint | ModelConfig,
    model: LoadedModel,
    mesh: Mesh,
    lora: Mapping[str, str],
    max_loras: int | None,
    max_lora_rank: int | None,
) -> Adapters | None:
    """Places in `model` and the adapters `lora`, name → folder or Hub id, in them; None if neither is asked for.

    max_loras, max_lora_rank: None: as many as there are, and as large as they need. Raises ValueError for adapters or
    a model that do not fit.
    """
    if not lora and max_loras is None:
        if max_lora_rank is not None:
            raise ValueError("max_lora_rank needs max_loras, or adapters in lora")
        return None
    folders = {name: convert.resolve(folder) for name, folder in lora.items()}
    rank = max_lora_rank
    if rank is None:
        rank = max((Adapter(folder).rank for folder in folders.values()), default=RANK)
    places = len(lora) if max_loras is None else max_loras
    adapters = Adapters(source, model.config, model.weights, mesh, dtype=model.dtype, places=places, rank=rank)
    for name, folder in folders.items():
        adapters.load(name, folder)
    return adapters


@functools.cache
def projections(config: ModelConfig) -> dict[str, Parameter]:
    """Path → declaration, of those that may take adapters."""
    return {path: parameter for path, parameter in flatten(declare(config)) if _TARGETS.fullmatch(path)}


def _shapes(parameter: Parameter, rows: int) -> dict[str, tuple[int, ...]]:
    """Of the factors of one adapter."""
    inputs, outputs = parameter.shape[: parameter.contract], parameter.shape[parameter.contract :]
    return {"a": (rows, *inputs), "b": (rows, *outputs)}


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, where: Any) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=where)()


@functools.cache
def _put(where: Any) -> Any:
    """Writes one adapter's factor to its place in the stack of all; not in place, for steps in flight may read that."""

    def put(stack: jax.Array, array: jax.Array, place: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, array, place, 0)

    return jax.jit(put, out_shardings=where)
