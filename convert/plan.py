"""What a conversion would do, without reading a weight."""

from __future__ import annotations

from collections.abc import Iterator

from convert.checkpoint import NUMPY_DTYPES, Checkpoint
from convert.tensors import TensorInfo
from jaxinfer.config import Quantization
from jaxinfer.parameters import abstract, flatten, resolve, stored_parts


def check_source(checkpoint: Checkpoint, quantization: Quantization | None) -> None:
    """Raises ValueError for what `save_native` has nothing to do for: already native, or already quantized."""
    if checkpoint.quantization is not None and (checkpoint.format == "native" or quantization is not None):
        end = "copy the folder" if checkpoint.format == "native" else "convert it without another quantization"
        raise ValueError(f"{checkpoint.path} is quantized to {checkpoint.quantization.format} already; {end}")
    if checkpoint.format == "native" and quantization is None:
        raise ValueError(f"{checkpoint.path} is a native checkpoint already; copy the folder")


def plan(checkpoint: Checkpoint, dtype: str | None, quantization: Quantization | None) -> Iterator[str]:
    """A line for each array of the native checkpoint, with its size and the tensors that it is made of, and the total.

    The arguments are those of `save_native`; raises ValueError as it does, also for a quantization that does not fit.
    """
    check_source(checkpoint, quantization)
    stored = checkpoint.quantization or resolve(checkpoint.config, quantization)
    leaves = abstract(checkpoint.config, NUMPY_DTYPES[dtype or checkpoint.dtype], lambda axes: None, stored)
    read, written = sum(info.nbytes for info in checkpoint.tensors.values()), 0
    for path, leaf in flatten(leaves):
        names = checkpoint.sources[path].names if path in checkpoint.sources else ()
        sources = ", ".join(_shown(name, checkpoint.tensors[name]) for name in names)
        for name, part in stored_parts(path, leaf).items():
            nbytes = part.size * part.dtype.itemsize
            written += nbytes
            line = f"{name} {list(part.shape)} {part.dtype.name}, {nbytes / 1e6:.3f} MB"
            yield f"{line} <- {sources}" if sources else line
    yield f"{checkpoint.path}: {read / 1e6:.1f} MB of tensors become {written / 1e6:.1f} MB"


def _shown(name: str, info: TensorInfo) -> str:
    return f"{name} {list(info.shape)} {info.dtype}"
