"""The tokenizer that comes with a checkpoint, whatever the checkpoint's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NATIVE_FOLDER = "tokenizer"
"""Where a native checkpoint keeps its tokenizer, as Hugging Face files."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""Any of these makes a folder one that `transformers` may read a tokenizer from."""


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, a native checkpoint folder, or a GGUF file.

    Nothing is fetched, and no code that comes with the checkpoint is run.

    Raises:
        FileNotFoundError: `path` does not exist or holds no tokenizer.
        ValueError: The tokenizer's files cannot be read, or its kind is not supported.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise FileNotFoundError(f"{path} is a file but no .gguf; give a checkpoint's folder or a .gguf file")
        from convert.gguf_tokenizer import load_gguf_tokenizer

        with without_torch_advice():
            return load_gguf_tokenizer(path)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}; give a checkpoint's folder or a .gguf file")
    ggufs = sorted(path.glob("*.gguf"))
    folder = next((f for f in (path / NATIVE_FOLDER, path) if any((f / n).is_file() for n in TOKENIZER_FILES)), None)
    if folder is None and len(ggufs) == 1:
        return load_tokenizer(ggufs[0])
    if folder is None:
        raise FileNotFoundError(
            f"{path} holds no tokenizer (looked there and in its folder '{NATIVE_FOLDER}' for "
            f"{', '.join(TOKENIZER_FILES)}); copy the model's tokenizer files there, "
            "or run on token ids with skip_tokenizer_init=True"
        )
    tokenizer = _load_folder(folder)
    _add_legacy_templates(tokenizer, folder)
    return tokenizer


def _load_folder(folder: Path) -> PreTrainedTokenizerBase:
    with without_torch_advice():
        from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # what `tokenizers` raises is of no narrower type
        raise ValueError(
            f"cannot read the tokenizer in {folder}: {error}\nA tokenizer.json is the form that always works; "
            "a tokenizer.model alone needs `pip install sentencepiece`"
        ) from error


def _add_legacy_templates(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Give the tokenizer the templates that `transformers` leaves out.

    It drops the template in tokenizer_config.json when the folder `additional_chat_templates` names others, and reads
    chat_template.json, where multimodal models keep theirs, for processors only.
    """
    templates = tokenizer.chat_template
    if isinstance(templates, str) or "default" in (templates or {}):
        return
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = folder / name
        template = json.loads(file.read_text(encoding="utf-8")).get("chat_template") if file.is_file() else None
        if isinstance(template, str):
            tokenizer.chat_template = {**templates, "default": template} if templates else template
            return


@contextmanager
def without_torch_advice() -> Iterator[None]:
    """Keep `transformers` from advising, while it is imported, that PyTorch is missing: here it always is."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("PyTorch was not found")

    logger = logging.getLogger("transformers")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
