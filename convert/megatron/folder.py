"""Finds the files of a Megatron-LM or DeepSpeed checkpoint and reads their headers, rank by rank.

Megatron-LM, `iter_0000500/` or `release/`: mp_rank_TT/model_optim_rng.pt, mp_rank_TT_PPP/… with pipeline stages.
Megatron-DeepSpeed, `global_step500/`: mp_rank_TT_model_states.pt; with pipeline stages a file for each layer and rank,
layer_LL-model_TT-model_states.pt, and the arguments in mp_rank_00_model_states.pt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.families.table import some
from convert.tensors import Stored
from convert.torch_pickle import Opaque, PickledTensor
from convert.torch_reader import read_state

_TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
_ITERATIONS = ("iter_*", "global_step*")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_DEEPSPEED = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_SIGNS = ("mp_rank_*", "layer_*-model_*-model_states.pt", "*zero_pp_rank_*")
_ZERO = "run the zero_to_fp32.py that DeepSpeed saved beside it, and convert what that writes"

type Rank = dict[str, Stored]
"""Name → place, of the tensors of one rank."""


@dataclass(frozen=True)
class Shards:
    """A checkpoint's headers."""

    folder: Path
    args: Mapping[str, Any]
    version: float
    """Of the order of queries, keys and values."""
    stages: list[list[Rank]]
    """In the order of the layers, for each stage its tensor-parallel ranks."""


def find(folder: Path) -> Path | None:
    """The folder of the iteration that the checkpoint's tracker names, or `folder` itself if it is one; else None.

    Raises FileNotFoundError if the tracker names an iteration that is not there, and others are.
    """
    absent = None
    for tracker in _TRACKERS:
        if (folder / tracker).is_file():
            text = (folder / tracker).read_text().strip()
            names = [f"iter_{int(text):07d}", f"global_step{int(text)}"] if text.isdecimal() else [text]
            for name in names:
                if Path(name).name == name and (folder / name).is_dir():
                    return folder / name
            absent = absent or f"{folder / tracker} names {text!r}, and there is no folder {names[0]!r}"
    if any(any(folder.glob(pattern)) for pattern in _SIGNS):
        return folder
    others = sorted(place.name for pattern in _ITERATIONS for place in folder.glob(pattern) if place.is_dir())
    if absent and others:
        raise FileNotFoundError(f"{absent}; give the folder of an iteration that is there: {some(others)}")
    return None


def read_shards(folder: Path) -> Shards:
    """The headers of what `find` found.

    Raises FileNotFoundError for a rank that is not there, ValueError for what is not read, saying what to do.
    """
    if (folder / ".metadata").exists():
        raise ValueError(
            f"{folder} is in Megatron's distributed format (torch_dist), which is not read; save it again with "
            "--ckpt-format torch (--ckpt-convert-format torch converts)"
        )
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        raise ValueError(f"{folder}: ZeRO 3 has cut up the weights, which is not read; {_ZERO}")
    layers = _numbered(folder, _LAYER)
    if layers:
        return _of_layers(folder, layers)
    files = _numbered(folder, _DEEPSPEED)
    if files:
        return _of_ranks(folder, {(rank, 0): file for (rank,), file in files.items()}, "module")
    found = {(rank, sum(stage)): _inside(place) for (rank, *stage), place in _numbered(folder, _RANK).items()}
    if not found:
        raise FileNotFoundError(f"{folder} holds parts of an optimizer's state, and no weights by themselves; {_ZERO}")
    return _of_ranks(folder, found, "model")


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    found = {}
    for place in sorted(folder.iterdir()):
        if match := pattern.fullmatch(place.name):
            found[tuple(int(number) for number in match.groups() if number is not None)] = place
    return found


def _inside(folder: Path) -> Path:
    return next((folder / name for name in _FILES if (folder / name).is_file()), folder / _FILES[0])


def _check_all(folder: Path, found: Mapping[tuple[int, int], Path]) -> tuple[int, int]:
    """The size of the grid. Raises FileNotFoundError if there is a hole in it."""
    first, second = (1 + max(numbers) for numbers in zip(*found))
    grid = {(row, column) for row in range(first) for column in range(second)}
    example = next(iter(found.values())).relative_to(folder)
    if absent := sorted(grid - {key for key, file in found.items() if file.is_file()}):
        numbers = some([" and ".join(map(str, key)) for key in absent])
        raise FileNotFoundError(
            f"{folder}: of {first} x {second} files like {example} some are missing, those numbered {numbers}"
        )
    return first, second


def _of_ranks(folder: Path, files: Mapping[tuple[int, int], Path], key: str) -> Shards:
    """files: (tensor rank, pipeline stage) → file."""
    tensor, pipeline = _check_all(folder, files)
    read = {place: read_state(file) for place, file in files.items()}
    first = read[0, 0][0]
    args = _arguments(first, files[0, 0])
    for name, size in (("tensor_model_parallel_size", tensor), ("pipeline_model_parallel_size", pipeline)):
        if args.get(name, size) != size:
            raise FileNotFoundError(f"{folder} was written with {name} {args[name]}, and holds files for {size}")
    chunks = [key] if key in first else [name for name in first if re.fullmatch(rf"{key}\d+", str(name))]
    if not chunks:
        raise ValueError(f"{files[0, 0]} holds no '{key}', where the weights should be; {_ZERO}")
    stages = [
        [_tensors(*read[rank, stage], chunk, files[rank, stage]) for rank in range(tensor)]
        for chunk in sorted(chunks, key=lambda chunk: (len(chunk), chunk))
        for stage in range(pipeline)
    ]
    return Shards(folder, args, _version(first), stages)


def _of_layers(folder: Path, files: Mapping[tuple[int, ...], Path]) -> Shards:
    """A file for each layer is a stage for each; those without layers keep their numbers, so there are holes."""
    numbers, ranks = sorted({layer for layer, _ in files}), 1 + max(rank for _, rank in files)
    _check_all(folder, {(numbers.index(layer), rank): file for (layer, rank), file in files.items()})
    main = folder / "mp_rank_00_model_states.pt"
    if not main.is_file():
        raise FileNotFoundError(f"{folder} has no {main.name}, which holds the arguments of the model")
    values, _ = read_state(main)
    stages = []
    for layer in numbers:
        read = [(*read_state(files[layer, rank]), files[layer, rank]) for rank in range(ranks)]
        stages.append([_tensors({"module": state}, place, "module", file) for state, place, file in read])
    return Shards(folder, _arguments(values, main), _version(values), stages)


def _arguments(values: Any, file: Path) -> Mapping[str, Any]:
    args = values.get("args") if isinstance(values, dict) else None
    args = args.state if isinstance(args, Opaque) else args
    if not isinstance(args, dict):
        raise ValueError(
            f"{file} holds no arguments of Megatron-LM's ('args'), so what model it is cannot be told; if DeepSpeed "
            f"trained a model of transformers', {_ZERO}"
        )
    return args


def _version(values: Mapping[str, Any]) -> float:
    version = values.get("checkpoint_version") or 0
    if not isinstance(version, int | float):
        raise ValueError(f"'checkpoint_version' is a {type(version).__name__}; it must be a number")
    return version


def _tensors(values: Any, place: Any, chunk: str, file: Path) -> Rank:
    """Name, joined by dots → place, of all that lies in a nested dict."""
    found: Rank = {}
    odd: list[str] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, PickledTensor):
            found[name] = place(name, value)
        elif not name.endswith("_extra_state"):  # of Transformer Engine, for training in 8 bits
            odd.append(name)

    walk(values.get(chunk), "")
    if odd:
        raise ValueError(f"{file}: not tensors: {some(odd)}; weights in 8 bits are not read (--fp8-param-gather)")
    return found
