"""The files of a folder that hold its weights: one, or those that an index lists."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convert.families.table import some
from convert.tensors import Stored


def stored_tensors(folder: Path, single: str, headers: Callable[[Path], Mapping[str, Stored]]) -> dict[str, Stored]:
    """The tensors of `folder / single`, or of the files that `single`.index.json lists; `headers` reads one file.

    Raises FileNotFoundError if files are absent, ValueError if the index names files elsewhere or does not agree with
    the files, or a tensor is stored twice.
    """
    index = folder / f"{single}.index.json"
    if not index.exists():
        return dict(headers(folder / single))
    listed = _weight_map(index)
    files = [folder / name for name in sorted(set(listed.values()))]
    if (folder / single).exists() and folder / single not in files:
        raise ValueError(
            f"{folder} holds {single} and, beside it, {index.name}, which lists other files: which are the weights? "
            "Remove those that are not"
        )
    if absent := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(
            f"{folder}: {index.name} lists files that are not there: {some(absent)}; download them again"
        )
    tensors: dict[str, Stored] = {}
    duplicates = []
    for file in files:
        for name, stored in headers(file).items():
            if name in tensors:
                duplicates.append(f"{name} ({tensors[name].file.name} and {file.name})")
            tensors[name] = stored
    if duplicates:
        raise ValueError(f"{folder}: tensors stored twice: {some(duplicates)}")
    moved = [
        f"{name} ({tensors[name].file.name}, not {file})"
        for name, file in listed.items()
        if name in tensors and tensors[name].file.name != file
    ]
    if moved:
        raise ValueError(f"{folder}: {index.name} does not agree with the files: {some(moved)}")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → name of its file, in the index's own folder."""
    values = load_json(index.read_bytes(), str(index))
    listed = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{index}: 'weight_map' must map names of tensors to names of files")
    plain = {file for file in listed.values() if Path(file).name == file and file not in ("", "..")}
    outside = sorted(file for file in set(listed.values()) if file not in plain or "\\" in file or "\0" in file)
    if outside:
        raise ValueError(f"{index} names files outside its folder: {some([repr(file) for file in outside])}")
    return listed


def load_json(data: bytes, where: str) -> Any:
    """The JSON value. Raises ValueError for what is no JSON, and for an object that has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            raise ValueError(f"has keys twice: {some([name for name, count in counts.items() if count > 1])}")
        return values

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from error
