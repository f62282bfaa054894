"""What of an unfinished checkpoint is written already, so that a conversion that was interrupted goes on there."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import zlib
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE_NAME = "journal.jsonl"
_BLOCK_BYTES = 4 << 20


class Journal:
    """The parts of a folder that are finished: the size and CRC-32 of every file of each, as they were written.

    The file is locked as long as it is open, so that two processes cannot write to one folder.
    """

    def __init__(self, folder: Path, fingerprint: str | None):
        """Keep what is in `folder` if it was written with this fingerprint; otherwise empty it and start over.

        None: keep nothing, now or later. Raises FileExistsError if another process is writing to the folder.
        """
        folder.mkdir(exist_ok=True)
        self.folder, self._keeps = folder, fingerprint is not None
        self._file = (folder / FILE_NAME).open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise FileExistsError(f"another process is writing to {folder}; wait for it, or end it") from error
        self._file.seek(0)
        first, *lines = [*map(_parsed, self._file)] or [{}]
        self._parts: dict[str, Any] = {}
        if fingerprint is not None and first.get("fingerprint") == fingerprint:
            self._parts = {
                line["part"]: line["files"] for line in lines if isinstance(line.get("part"), str) and line.get("files")
            }
            return
        if first:
            logger.warning("%s was begun with other settings, or of another source: starting over", folder)
        self._start_over(fingerprint)

    def __len__(self) -> int:
        return len(self._parts)

    def record(self, part: str, place: Path) -> None:
        """That the file or folder at `place` is finished; not where nothing is to be kept."""
        if not self._keeps:
            return
        self._parts[part] = _sums(place)
        # The line's end comes first: the line before may have been cut short.
        self._file.write("\n" + json.dumps({"part": part, "files": self._parts[part]}))
        self._file.flush()

    def holds(self, part: str, place: Path) -> bool:
        """Whether what is at `place` is all that was recorded; says so if it is not."""
        if part not in self._parts:
            return False
        if _sums(place) == self._parts[part]:
            return True
        logger.warning("%s is damaged, so it is written again", place)
        return False

    def close(self) -> None:
        """Let others write to the folder."""
        self._file.close()

    def _start_over(self, fingerprint: str | None) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != FILE_NAME:
                entry.unlink()
        self._file.truncate(0)
        self._file.write(json.dumps({"fingerprint": fingerprint}))
        self._file.flush()


def _parsed(line: str) -> dict[str, Any]:
    """A line of the journal; nothing of one that was cut short or is damaged."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _sums(place: Path) -> dict[str, list[int]]:
    """Name of a file in the folder `place`, or of `place` itself → [bytes, CRC-32]."""
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.exists() else []
    return {file.name: _sum(file) for file in files}


def _sum(file: Path) -> list[int]:
    size = crc = 0
    with file.open("rb", buffering=0) as opened:
        while block := opened.read(_BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
