"""Where a converted checkpoint goes: written beside its place, and moved there when it is complete."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convert import journal, manifest
from convert.checkpoint import Checkpoint
from convert.journal import Journal

logger = logging.getLogger(__name__)

_PARTIAL, _SCRATCH, _REPLACED = ".partial", ".scratch", ".replaced"
"""Endings of the hidden folders beside a destination: unfinished, needed until the end, and what was there before."""


def check_destination(path: Path, force: bool, checkpoint: Checkpoint | None = None, nbytes: int = 0) -> None:
    """Raises FileExistsError unless a converted checkpoint may be written at `path`: not in place of what it is made
    of, `checkpoint`. Raises OSError if its disk has less than `nbytes` free.
    """
    if path.is_symlink():
        raise FileExistsError(f"{path} is a link, which cannot be replaced; give the folder itself, {path.resolve()}")
    if Path.cwd().is_relative_to(path.resolve()):
        raise FileExistsError(f"{path} is the current folder or around it, so it cannot be replaced; leave it first")
    sources = [] if checkpoint is None else [checkpoint.path, *([checkpoint.adapter] if checkpoint.adapter else [])]
    if held := [source for source in sources if source.resolve().is_relative_to(path.resolve())]:
        raise FileExistsError(f"{path} is, or holds, {held[0]}, which would be lost; choose another place")
    _check_room(path, nbytes)
    if not path.exists():
        return
    replaceable = path.is_dir() and (_is_ours(path) or not any(path.iterdir()))
    if not replaceable:
        raise FileExistsError(f"{path} is not a native checkpoint, so it is not replaced; remove it yourself")
    if not force:
        raise FileExistsError(f"{path} exists; choose another place, or pass --force to replace it")


def _check_room(path: Path, nbytes: int) -> None:
    """What an unfinished conversion to `path` wrote already counts as free: it is kept, or goes."""
    parent = next(folder for folder in path.resolve().parents if folder.is_dir())
    kept = [file for file in _beside(path.resolve(), _PARTIAL).rglob("*") if file.is_file()]
    free = shutil.disk_usage(parent).free + sum(file.stat().st_size for file in kept)
    if nbytes > free:
        raise OSError(
            errno.ENOSPC,
            f"{nbytes / 1e6:.1f} MB are to be written, and {free / 1e6:.1f} MB are free on the disk of {path}",
        )


@contextmanager
def resumable(path: Path, fingerprint: str | None) -> Iterator[Journal]:
    """The journal of a folder to write into, which takes the place of `path` at the end.

    If there is an error, or the process is killed, the folder stays, hidden beside `path`, for the next conversion with
    the same fingerprint to go on with; one with another starts over. With nothing finished in it, it goes. What makes
    it load is written last, so that it does not before. What was at `path` goes when the new is in its place, so a kill
    leaves one or both. Raises FileExistsError if another process is writing to the folder.
    """
    path = path.resolve()
    with _journal(_beside(path, _PARTIAL), fingerprint) as finished:
        yield finished
        replaced = _beside(path, _REPLACED)
        if path.exists():
            if replaced.exists():
                shutil.rmtree(replaced)
            path.rename(replaced)
        finished.folder.rename(path)
        (path / journal.FILE_NAME).unlink()
        if replaced.exists():
            shutil.rmtree(replaced)


@contextmanager
def resumable_scratch(path: Path, fingerprint: str) -> Iterator[Journal]:
    """The same for what is only needed until the end, when it goes: a hidden folder beside `path`."""
    with _journal(_beside(path.resolve(), _SCRATCH), fingerprint) as finished:
        yield finished
        shutil.rmtree(finished.folder)


@contextmanager
def _journal(folder: Path, fingerprint: str | None) -> Iterator[Journal]:
    """Of the folder, which stays if there is an error and something in it is finished."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    finished = Journal(folder, fingerprint)
    try:
        yield finished
    except BaseException:
        if finished:
            logger.warning("%s keeps what is written; the same command again goes on there", folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        finished.close()


@contextmanager
def whole_or_not_at_all(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` at the end, and goes if there is an error.

    What a process that is killed leaves does not load, and goes with the next conversion to the same place.
    """
    with resumable(path, None) as finished:
        yield finished.folder


def fingerprint(checkpoint: Checkpoint, **settings: Any) -> str:
    """Of what a conversion reads and how: the names, sizes and times of the source's files, its config, the settings.

    settings: by name, anything with a repr that says all of it.
    """
    sources = [checkpoint.path] if checkpoint.adapter is None else [checkpoint.path, checkpoint.adapter]
    files = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns)
        for source in sources
        for file in _files(source, checkpoint.format)
    ]
    form = (manifest.FORMAT_VERSION, checkpoint.format, checkpoint.dtype, repr(checkpoint.quantization))
    values = [files, form, checkpoint.config.to_dict(), sorted((name, repr(value)) for name, value in settings.items())]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _files(source: Path, form: str) -> list[Path]:
    """Those of a folder, and of folders in it where the format has weights there; or the file.

    Without those of conversions into that folder, which come and go.
    """
    if source.is_file():
        return [source.resolve()]
    below = source.rglob("*") if form in ("native", "megatron") else source.glob("*")
    return sorted(
        file.absolute()
        for file in below
        if file.is_file() and not any(_is_beside(name) for name in file.relative_to(source).parts)
    )


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _is_beside(name: str) -> bool:
    """Whether it may be a name that `_beside` gave."""
    return name.startswith(".") and name.endswith((_PARTIAL, _SCRATCH, _REPLACED))


def _is_ours(path: Path) -> bool:
    return (path / manifest.FILE_NAME).exists()
