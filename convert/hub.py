"""Where a model is: a local path, or a Hugging Face Hub id whose files are downloaded once."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Configs, tokenizers, chat templates and weights; not the PyTorch, GGUF or ONNX copies beside them."""
_TORCH = ["pytorch_model*.bin", "adapter_model.bin"]
"""For a model that has nothing else."""


def resolve(model: str | os.PathLike[str]) -> Path:
    """The local path of a model given as a path or as a Hub id (`org/name`).

    A Hub id is downloaded into the Hub's own cache (`HF_HOME`); with `HF_HUB_OFFLINE=1` only that cache is used.
    Raises FileNotFoundError if it is neither, or cannot be had, ValueError for what is no name of anything.
    """
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise ValueError(f"the model is {model!r}; give the path of a checkpoint, or a Hub id like 'org/name'")
    path = Path(model).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(str(model)):
        raise FileNotFoundError(
            f"no such model: '{model}' is neither a file or folder here ({path.absolute()}) nor a Hub id like "
            "'org/name'; give the path of a checkpoint folder, of a .gguf file, or a Hub id"
        )
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    logger.info("fetching %s from the Hugging Face Hub", model)
    try:
        folder = Path(huggingface_hub.snapshot_download(str(model), allow_patterns=_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(str(model), allow_patterns=[*_FILES, *_TORCH]))
        return folder
    except (OSError, HFValidationError) as error:  # the Hub's own errors, and those of the network, are OSErrors
        raise FileNotFoundError(
            f"no such model: '{model}' is not a path here ({path.absolute()}), and as a Hub id it could not be "
            f"fetched: {str(error).strip().splitlines()[0]}. Check the name, the network, HF_HUB_OFFLINE, and for a "
            "gated model that you are logged in (`hf auth login`)"
        ) from error
