"""Arrays that are made when Orbax writes them, so that a checkpoint larger than memory can be written."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from convert.journal import Journal

_BATCH_BYTES = 64 << 20
"""Small arrays are written together, as many at once as have these bytes."""
_PIECES_AT_ONCE = 4
"""Of an array, each of which takes memory while it is written."""
_EARLIER = "earlier"
"""A folder for the arrays that an interrupted call finished, each in the folder that Orbax gave it."""

type_handlers = ocp.type_handlers
NumpyHandler: Any = type_handlers.NumpyHandler


@dataclass(frozen=True)
class LateArray:
    """An array that is not there yet."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    chunk: tuple[int, ...]
    """The shape in which it is stored, a file for each piece, which is read as a whole."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class LateArrayHandler(NumpyHandler):
    """Writes arrays before it makes the next. What it writes is read as any array of numpy's.

    It is written here and not by Orbax, which would choose the pieces itself.
    """

    def __init__(self, update: Callable[[int], object], finished: Journal):
        """update: takes the bytes written. finished: is told of each array, by its name."""
        super().__init__(deepcopy_host_arrays=False)
        self._update, self._finished = update, finished

    async def serialize(self, values: Sequence[LateArray], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Returns when all is written, so there is nothing left to wait for."""
        for batch in _batches(values):
            absent = [position for position in batch if not await self._is_kept(infos[position])]
            await self._write([values[position] for position in absent], [infos[position] for position in absent])
            self._update(sum(values[position].nbytes for position in batch))
        return []

    async def _write(self, values: list[LateArray], infos: list[Any]) -> None:
        arrays = [await asyncio.to_thread(value.make) for value in values]
        for array, value, info in zip(arrays, values, infos):
            await _store(array, value, info)
        del arrays
        for info in infos:
            await asyncio.to_thread(self._finished.record, info.name, Path(info.path))

    async def _is_kept(self, info: Any) -> bool:
        """Whether the array was finished before; it is moved to its place then."""
        await info.await_path_creation()
        place = self._finished.folder / _EARLIER / info.name
        kept = await asyncio.to_thread(self._finished.holds, info.name, place)
        if kept:
            place.rename(info.path)
        return kept

    def memory_size(self, values: Sequence[LateArray]) -> list[tuple[int, int]]:
        """(bytes written, bytes read) of each."""
        return [(value.nbytes, value.nbytes) for value in values]


async def _store(array: np.ndarray, value: LateArray, info: Any) -> None:
    """As Orbax does it: zarr, and also the pieces of zeros. Uncompressed: weights are noise to it."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{info.path}/"},
        "metadata": {"shape": value.shape, "chunks": value.chunk, "compressor": None},
        "store_data_equal_to_fill_value": True,
    }
    opened = await ts.open(spec, dtype=ts.dtype(value.dtype), create=True, context=info.ts_context)
    pieces = np.ndindex(*(size // chunk for size, chunk in zip(value.shape, value.chunk)))
    for numbers in itertools.batched(pieces, _PIECES_AT_ONCE):
        places = [tuple(slice(n * c, (n + 1) * c) for n, c in zip(number, value.chunk)) for number in numbers]
        await asyncio.gather(
            *(
                opened[place].write(np.ascontiguousarray(array[place]), can_reference_source_data_indefinitely=True)
                for place in places
            )
        )


def _batches(values: Sequence[LateArray]) -> Iterator[range]:
    """Neighbours that together have at most `_BATCH_BYTES`, or one that alone has more."""
    start = size = 0
    for position, value in enumerate(values):
        if position > start and size + value.nbytes > _BATCH_BYTES:
            yield range(start, position)
            start, size = position, 0
        size += value.nbytes
    if values:
        yield range(start, len(values))


def save(
    folder: Path,
    arrays: dict[str, LateArray],
    update: Callable[[int], object],
    finished: Journal,
) -> None:
    """Write a plain Orbax checkpoint at `folder`.

    Every array has a folder of its own (no OCDBT, which joins them), so that those which an interrupted call wrote into
    the journal's folder can be kept. `update` takes the bytes written.
    """
    earlier = finished.folder / _EARLIER
    _set_aside(folder, earlier)
    registry = type_handlers.create_type_handler_registry(
        (LateArray, LateArrayHandler(update, finished)), (jax.Array, type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
    checkpointer = ocp.Checkpointer(handler)
    try:
        with _quiet_about_ocdbt():
            checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays))
    finally:
        checkpointer.close()
    shutil.rmtree(earlier)


def _set_aside(folder: Path, earlier: Path) -> None:
    """Arrays under `folder`, or under what Orbax calls it until it is complete, to `earlier`."""
    earlier.mkdir(exist_ok=True)
    for old in folder.parent.glob(f"{folder.name}*"):
        for array in old.iterdir():
            if array.is_dir():
                shutil.rmtree(earlier / array.name, ignore_errors=True)
                array.rename(earlier / array.name)
        shutil.rmtree(old)


@contextmanager
def _quiet_about_ocdbt() -> Iterator[None]:
    """Orbax warns that there is nothing to merge wherever OCDBT is off."""

    def is_other(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
