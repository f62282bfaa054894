"""Megatron-LM's and Megatron-DeepSpeed's checkpoints: a file for each rank, merged while it is read.

Nothing in the files is run: the arguments of training are read as plain data. Rows and columns of a weight are read
from the files that hold them, so memory is that of any other format.
"""

from __future__ import annotations

import logging
from pathlib import Path

from convert.families.table import Source, match
from convert.megatron import names
from convert.megatron.args import model_config
from convert.megatron.folder import find, read_shards
from convert.megatron.merged import MergedReader
from convert.megatron.names import IGNORED
from jaxinfer.config import ModelConfig

__all__ = ["IGNORED", "find", "read_megatron"]

logger = logging.getLogger(__name__)


def read_megatron(folder: Path) -> tuple[MergedReader, ModelConfig, dict[str, Source]]:
    """Tensors, config and sources of the iteration in `folder`.

    Raises FileNotFoundError for a rank that is not there, ValueError for ranks that do not fit each other, for tensors
    that do not fit the arguments, and for arguments that are not supported.
    """
    shards = read_shards(folder)
    rows = names.vocabulary(shards)
    config = model_config(shards.args, rows, shards.version, f"{folder}, args")
    if config.vocab_size == rows and "vocab_size" not in shards.args:
        logger.warning("%s does not say its vocabulary's size: all %d rows, padding too, are ids", folder, rows)
    reader = MergedReader(names.merged(shards, config))
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    return reader, config, match(config, names.table(shards.version), shapes, IGNORED, str(folder))
