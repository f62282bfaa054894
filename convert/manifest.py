"""`jaxinfer.json`: what a native checkpoint holds, read without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.config import ModelConfig

FILE_NAME = "jaxinfer.json"
FORMAT_VERSION = 1
"""Raised when the canonical shapes, or the layout of the folder, change."""


@dataclass(frozen=True)
class Manifest:
    """Contents of `jaxinfer.json`."""

    config: ModelConfig
    dtype: str

    def write(self, folder: Path) -> None:
        values = {"format_version": FORMAT_VERSION, "dtype": self.dtype, "config": self.config.to_dict()}
        (folder / FILE_NAME).write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ValueError for a folder written by a version newer than this one."""
        values = json.loads((folder / FILE_NAME).read_text())
        if values["format_version"] > FORMAT_VERSION:
            raise ValueError(
                f"{folder} has format version {values['format_version']}, and this jaxinfer reads up to "
                f"{FORMAT_VERSION}; upgrade jaxinfer, or convert the original checkpoint again"
            )
        return cls(ModelConfig.from_dict(values["config"]), values["dtype"])
