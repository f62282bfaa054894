"""Text models inside checkpoints that also hold a vision tower, which is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from convert.families.fields import Fields, token_ids
from convert.families.general import skip_general
from convert.families.table import Source, Table
from jaxinfer.config import ModelConfig


def text_config(
    fields: Fields,
    family: str,
    readers: Mapping[str, Callable[[Fields], ModelConfig]],
    default: str,
    tied: bool = False,
) -> ModelConfig:
    """The config that `text_config` describes. readers: its `model_type` → the family's config function.

    A head is tied, and there are end ids, where either section says so. tied: what the outer one says by default.
    """
    text = fields.section("text_config")
    skip_general(text)
    read = text.choice("model_type", text.get("model_type", default), readers)
    fields.ignore(["vision_config", "bos_token_id"])
    tied, ends = fields.boolean("tie_word_embeddings", tied), token_ids(fields, "eos_token_id")
    config = read(text)
    text.finish()
    return dataclasses.replace(
        config, family=family, tied_head=config.tied_head or tied, eos_token_ids=ends or config.eos_token_ids
    )


def inside(name: str, table: Table) -> Table:
    """The rows of a text model's table, its tensors being under `name`."""
    return {
        path: Source(tuple(f"{name}.{tensor}" for tensor in row.names), row.transform) for path, row in table.items()
    }
