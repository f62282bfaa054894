"""`jaxinfer.json`: what a native checkpoint holds, read without its weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.config import ModelConfig, Quantization

FILE_NAME = "jaxinfer.json"
FORMAT_VERSION = 2
"""Raised when canonical shapes, the order of packed int4 or the layout of the folder change. 2: quantized weights."""


@dataclass(frozen=True)
class Manifest:
    """Contents of `jaxinfer.json`."""

    config: ModelConfig
    dtype: str
    """Of what is not quantized."""
    quantization: Quantization | None = None

    def write(self, folder: Path) -> None:
        """Of the oldest version that reads it."""
        version = 1 if self.quantization is None else FORMAT_VERSION
        values = {"format_version": version, "dtype": self.dtype, "config": self.config.to_dict()}
        if self.quantization is not None:
            values["quantization"] = dataclasses.asdict(self.quantization)
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
        quantization = Quantization(**values["quantization"]) if "quantization" in values else None
        return cls(ModelConfig.from_dict(values["config"]), values["dtype"], quantization)
