"""Megatron's names through the years → ours for them, and how the pieces of the ranks make one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from convert import joined, transforms
from convert.families.decoder import linear_rows, norm_rows
from convert.families.table import Source, Table, some
from convert.megatron.folder import Rank, Shards
from convert.megatron.merged import Columns, Rows, Tensor
from convert.tensors import Stored
from convert.transforms import Slot, Transform
from jaxinfer.config import ModelConfig

_PREFIX = re.compile(
    r"(module\.)*(language_model\.)?(embedding\.(?=\w+_embeddings))?((encoder|transformer|decoder)\.)?"
)
_RENAMED = {
    r"word_embeddings\.norm\.(weight|bias)": r"embed_norm.\1",
    r"(word|position)_embeddings\.weight": r"\1.weight",
    r"word_embeddings_for_head\.weight": "copy.weight",
    r"(output_layer|lm_head)\.weight": "head.weight",
    r"(final_layernorm|final_norm)\.(weight|bias)": r"final_norm.\2",
}
_RENAMED_IN_LAYER = {
    r"(input_layernorm|input_norm)\.(weight|bias)": r"input_norm.\2",
    r"(self_attention\.linear_qkv|attention\.query_key_value)\.layer_norm_(weight|bias)": r"input_norm.\2",
    r"(self_)?attention\.(query_key_value|linear_qkv)\.(weight|bias)": r"qkv.\3",
    r"(self_)?attention\.([qk])_(layernorm|norm)\.(weight|bias)": r"\2_norm.\4",
    r"(self_)?attention\.(dense|linear_proj)\.(weight|bias)": r"out.\3",
    r"(post_attention_layernorm|post_attention_norm|pre_mlp_layernorm)\.(weight|bias)": r"post_norm.\2",
    r"mlp\.linear_fc1\.layer_norm_(weight|bias)": r"post_norm.\1",
    r"mlp\.(dense_h_to_4h|linear_fc1)\.(weight|bias)": r"fc1.\2",
    r"mlp\.(dense_4h_to_h|linear_fc2)\.(weight|bias)": r"fc2.\2",
}
_BY_ROWS = re.compile(r"(word|head|copy)\.weight|layers\.\d+\.(qkv|fc1)\.(weight|bias)")
_BY_COLUMNS = re.compile(r"layers\.\d+\.(out|fc2)\.weight")
IGNORED = (
    r".*_extra_state",
    r".*rotary_(pos_)?emb\.(inv_freq|freqs)",
    r".*\.(attention|core_attention)\.(masked_)?bias",
)


def merged(shards: Shards, config: ModelConfig) -> dict[str, Tensor]:
    """Our name → tensor. Raises ValueError if the ranks do not fit each other."""
    tensors: dict[str, Tensor] = {}
    for name, pieces in _pieces(shards):
        if name == "copy.weight" or (name == "head.weight" and config.tied_head):
            continue  # the embedding's, for the last stage
        if name in tensors:
            raise ValueError(f"{shards.folder}: two stages hold {name}")
        tensors[name] = _joined(name, pieces, shards, config)
    return tensors


def vocabulary(shards: Shards) -> int:
    """Rows of the embedding, padded ones too. Raises ValueError if there is none."""
    for name, pieces in _pieces(shards):
        if name == "word.weight":
            return sum(piece.shape[0] for piece in pieces if piece.shape)
    raise ValueError(f"{shards.folder} holds no word_embeddings.weight")


def _pieces(shards: Shards) -> Iterator[tuple[str, list[Stored]]]:
    """(our name, with the layer's number in the model; its piece of each rank)."""
    before = 0
    for ranks in shards.stages:
        named = [_renamed(rank) for rank in ranks]
        numbers = {int(match.group(1)) for name in named[0] if (match := re.match(r"layers\.(\d+)\.", name))}
        for name in named[0]:
            pieces = [rank[name] for rank in named if name in rank]
            if len(pieces) != len(named):
                raise ValueError(f"{shards.folder}: only {len(pieces)} of {len(named)} ranks hold {name}")
            _check_alike(name, pieces, shards.folder)
            yield _moved(name, before), pieces
        if unknown := sorted(set().union(*named) - set(named[0])):
            raise ValueError(f"{shards.folder}: not all ranks hold {some(unknown)}")
        before += len(numbers)


def _moved(name: str, layers: int) -> str:
    """The name of a layer that comes so many layers later."""
    return re.sub(r"^layers\.(\d+)", lambda match: f"layers.{layers + int(match.group(1))}", name)


def _renamed(rank: Rank) -> Rank:
    """A stage of a single layer, or of a final norm, has names without what they belong to."""
    found = {}
    for name, stored in rank.items():
        bare = _PREFIX.sub("", name, count=1)
        layer, inner = re.fullmatch(r"(layers\.\d+\.)?(.*)", bare).groups()  # type: ignore[union-attr]
        ours = _first(_RENAMED, bare)
        if ours is None and (part := _first(_RENAMED_IN_LAYER, inner)) is not None:
            ours = f"{layer or 'layers.0.'}{part}"
        if ours is None and set(rank) <= {"weight", "bias"}:
            ours = f"final_norm.{name}"
        found[name if ours is None else ours] = stored
    return found


def _first(rules: Mapping[str, str], name: str) -> str | None:
    for pattern, ours in rules.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(ours)
    return None


def _check_alike(name: str, pieces: list[Stored], folder: Path) -> None:
    if len({(piece.shape, piece.dtype) for piece in pieces}) > 1:
        each = ", ".join(f"{piece.dtype} {list(piece.shape)}" for piece in pieces)
        raise ValueError(f"{folder}: the ranks do not agree about {name}: {each}")


def _joined(name: str, pieces: list[Stored], shards: Shards, config: ModelConfig) -> Tensor:
    first = pieces[0]
    dims = 2 if _BY_COLUMNS.fullmatch(name) else 1
    if len(first.shape) < dims:
        raise ValueError(f"{shards.folder}: {name} is {list(first.shape)}; it should have {dims} dimensions or more")
    if _BY_COLUMNS.fullmatch(name):
        return Columns(tuple(pieces))
    if not _BY_ROWS.fullmatch(name):
        return Rows(((first, 0, first.shape[0]),))
    # Parts that every rank has one of: gates and ups; in the oldest versions queries, keys and values.
    parts = 2 if ".fc1." in name and config.gated_mlp else 3 if ".qkv." in name and shards.version < 1 else 1
    rows = first.shape[0] // parts
    if rows * parts != first.shape[0]:
        raise ValueError(f"{shards.folder}: {name} has {first.shape[0]} rows a rank; they should be {parts} parts")
    runs = Rows(tuple((piece, part * rows, rows) for part in range(parts) for piece in pieces))
    return runs.cut(config.vocab_size) if name in ("word.weight", "head.weight") else runs


def table(version: float) -> Table:
    """The rows for the order that queries, keys and values have in this version."""
    weight, bias = _ORDERS[0 if version < 1 else 1 if version < 2 else 2]
    return {
        "embed.weight": Source(("word.weight",), transforms.whole),
        "positions.weight": Source(("position.weight",), transforms.whole),
        **norm_rows("embed_norm", "embed_norm"),
        **norm_rows("layers.{}.attention_norm", "layers.{}.input_norm"),
        **linear_rows("layers.{}.attention.qkv", ("layers.{}.qkv",), weight, bias),
        "layers.{}.attention.q_norm.scale": Source(("layers.{}.q_norm.weight",), transforms.whole),
        "layers.{}.attention.k_norm.scale": Source(("layers.{}.k_norm.weight",), transforms.whole),
        **linear_rows("layers.{}.attention.out", ("layers.{}.out",), transforms.attention_out),
        **norm_rows("layers.{}.mlp_norm", "layers.{}.post_norm"),
        **linear_rows(
            "layers.{}.mlp.gate_up",
            ("layers.{}.fc1",),
            joined.joined(transforms.fused_gate_up),
            joined.joined(transforms.fused_gate_up_bias),
        ),
        **linear_rows("layers.{}.mlp.up", ("layers.{}.fc1",), transforms.transposed),
        **linear_rows("layers.{}.mlp.down", ("layers.{}.fc2",), transforms.transposed),
        **norm_rows("final_norm", "final_norm"),
        "head.weight": Source(("head.weight",), transforms.transposed),
    }


def _last_of_three(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    """qkv [embed, heads, 3, head_dim] from [(heads, head_dim, 3), embed]."""
    return (Slot(out.transpose(1, 3, 2, 0), 3),)


def _last_of_three_bias(out: np.ndarray, config: ModelConfig) -> tuple[Slot, ...]:
    return (Slot(out.transpose(0, 2, 1), 3),)


_ORDERS: tuple[tuple[Transform, Transform], ...] = (
    (joined.joined(transforms.fused_qkv), joined.joined(transforms.fused_qkv_bias)),
    (_last_of_three, _last_of_three_bias),
    (joined.grouped_qkv, joined.grouped_qkv_bias),
)
"""Of versions 0, 1 and later: rows by (q/k/v, head, dim), (head, dim, q/k/v), (kv head, its queries and key and value,
dim)."""
