"""Checkpoints in: Hugging Face folders, GGUF files and our native format, streamed to their place on a mesh.

    resolve(model)                         a local path, or a Hub id downloaded             hub.py
    open_checkpoint(path) → Checkpoint     configs and headers only, no weights, no jax     checkpoint.py
    load(checkpoint, abstract, physical)   the weights, tensor by tensor, sharded           loading.py
    save_native(checkpoint, path)          the native format: any mesh restores it          native.py
    save_safetensors(checkpoint, path)     a Hugging Face folder                            export.py
    register_family(name, config, table)   an architecture of your own                      families/

`families/` holds what differs between model families: a config function and a table of tensor names each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint, open_checkpoint
    from convert.export import save_safetensors
    from convert.families import register_family
    from convert.hub import resolve
    from convert.loading import load
    from convert.native import save_native

__all__ = ["Checkpoint", "load", "open_checkpoint", "register_family", "resolve", "save_native", "save_safetensors"]

_MODULES = {
    "Checkpoint": "convert.checkpoint",
    "open_checkpoint": "convert.checkpoint",
    "register_family": "convert.families",
    "resolve": "convert.hub",
    "load": "convert.loading",
    "save_native": "convert.native",
    "save_safetensors": "convert.export",
}


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used: `load` and `save_native` bring jax, the others must not."""
    if name not in _MODULES:
        raise AttributeError(f"module 'convert' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
