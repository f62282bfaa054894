"""`jaxinfer.json`: what a native checkpoint holds, read without its weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from convert.families.fields import Fields
from convert.shards import load_json
from jaxinfer.config import ModelConfig, Quantization

FILE_NAME = "jaxinfer.json"
HUGGING_FACE = "huggingface"
"""The folder in it with the CONFIGS that it was made with, which an export needs."""
CONFIGS = ("config.json", "generation_config.json")
NAMES = "names.json"
"""Beside them: our path → the names of the tensors that it was made of."""
FORMAT_VERSION = 4
"""Raised when canonical shapes, the order of packed int4 or the layout of the folder change.

2: quantized weights. 3: in 8 bits without the head. 4: with the experts, which older ones left as they were.
"""


@dataclass(frozen=True)
class Manifest:
    """Contents of `jaxinfer.json`."""

    config: ModelConfig
    dtype: str
    """Of what is not quantized."""
    quantization: Quantization | None = None

    def write(self, folder: Path) -> None:
        """Of the oldest version that reads it."""
        quantization = self.quantization
        if quantization is not None and self.config.num_experts and quantization.experts:
            version = 4
        else:
            version = 1 if quantization is None else 2 if quantization.head else 3
        values = {"format_version": version, "dtype": self.dtype, "config": self.config.to_dict()}
        if quantization is not None:
            since = {"head": 3, "experts": 4, "layers": 4}
            fields = dataclasses.asdict(quantization)
            values["quantization"] = {name: field for name, field in fields.items() if version >= since.get(name, 2)}
        (folder / FILE_NAME).write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises ValueError for a folder written by a version newer than this one, and for a file that is damaged."""
        file = folder / FILE_NAME
        values = load_json(file.read_bytes(), str(file))
        if not isinstance(values, dict):
            raise ValueError(f"{file} holds no object; convert the original checkpoint again")
        version = Fields(values, str(file)).integer("format_version")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"{folder} has format version {version}, and this jaxinfer reads up to "
                f"{FORMAT_VERSION}; upgrade jaxinfer, or convert the original checkpoint again"
            )
        try:
            config, quantization = ModelConfig.from_dict(values["config"]), None
            if "quantization" in values:
                fields = {**values["quantization"]}
                if config.num_experts and version < 4:
                    fields["experts"] = False
                quantization = Quantization(**fields)
            return cls(config, values["dtype"], quantization)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error!r}); convert the original checkpoint again") from error
