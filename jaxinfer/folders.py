"""Where jaxinfer keeps files that it can fetch or make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$JAXINFER_CACHE, or `jaxinfer` in $XDG_CACHE_HOME or in ~/.cache."""
    if folder := os.environ.get("JAXINFER_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxinfer"
