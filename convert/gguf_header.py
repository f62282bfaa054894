"""The header of a GGUF file, read by the gguf package: metadata and where each tensor lies."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file."""

    shape: tuple[int, ...]
    """Rows first, as numpy counts."""
    type: int
    """A GGMLQuantizationType."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    metadata: dict[str, Any]
    """Key → number, string, boolean or list of them."""
    tensors: dict[str, StoredTensor]


def gguf_package() -> Any:
    """The optional gguf package. Raises ImportError saying how to install it."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ImportError("reading a GGUF file needs the gguf package: pip install 'jaxinfer[gguf]'") from error


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file. Raises ValueError for anything else, and for a file cut off or damaged."""
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: its first bytes are not 'GGUF'")
    return _read_header(path.absolute(), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read_header(path: Path, modified: int) -> GgufHeader:
    """Kept, since the package takes seconds for a large vocabulary, and weights and tokenizer both ask."""
    try:
        reader = gguf_package().GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: the GGUF file cannot be read ({error}); if it is cut off or damaged, download it again"
        ) from error
    tensors = {
        t.name: StoredTensor(tuple(int(dim) for dim in reversed(t.shape)), int(t.tensor_type), int(t.data_offset))
        for t in reader.tensors
    }
    return GgufHeader(metadata, tensors)
