"""The tokenizer that a GGUF file describes in its metadata.

`transformers` reads GGUF only where PyTorch is installed, so the `tokenizers` pipeline is built here. Where llama.cpp
and the model's original tokenizer differ, the original is followed: the model was trained with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.gguf_header import read_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of `token_type`. Two more, 5 (unused) and 6 (a byte), are plain entries of the vocabulary."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


@dataclass(frozen=True)
class _PreTokenizer:
    """How a byte-level BPE model cuts a text into the parts that are merged separately."""

    regex: str | None = None
    """None: GPT-2's, which is built in."""
    single_digits: bool = False
    """Cut at every digit first."""
    ignore_merges: bool = False
    """A part that is a token as a whole is that token, whatever the merges say."""
    compose: bool = False
    """Unicode NFC before all else."""
    add_bos: bool = False
    """What holds where the metadata does not say."""


_GPT2 = _PreTokenizer()
_LLAMA3 = _PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "smollm": _PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", compose=True),
    "gpt-2": _GPT2,
    "default": _GPT2,
}
"""`tokenizer.ggml.pre` → how it cuts."""


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in the metadata of a GGUF file, with its special tokens and chat templates.

    Raises:
        FileNotFoundError: The file describes no tokenizer.
        ValueError: It is no GGUF file, its tokenizer is of a kind that is not supported, or contradicts itself.
    """
    return build_tokenizer(read_header(path).metadata, str(path))


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> PreTrainedTokenizerFast:
    """The tokenizer that GGUF metadata describes; `where` begins the messages of errors (see load_gguf_tokenizer)."""
    from transformers import PreTrainedTokenizerFast

    values = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    if "model" not in values or "tokens" not in values:
        raise FileNotFoundError(
            f"{where} holds no tokenizer; use a GGUF file with one, or run on token ids with skip_tokenizer_init=True"
        )
    kind, tokens = values["model"], values["tokens"]
    if kind not in _MODELS:
        raise ValueError(f"{where}: tokenizer model '{kind}' is not supported; supported: {', '.join(_MODELS)}")
    types = values.setdefault("token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{where}: {len(tokens)} tokens but {len(types)} token types")
    if len(set(tokens)) != len(tokens):
        twice = sorted({token for token in tokens if tokens.count(token) > 1})[:5]
        raise ValueError(f"{where}: tokens listed twice: {twice}")
    tokenizer, add_bos = _MODELS[kind](values, where)
    _add_tokens(tokenizer, values)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **_special_tokens(values, where),
        add_bos_token=_default(values, "bos", add_bos, where),
        add_eos_token=_default(values, "eos", False, where),
        chat_template=_chat_templates(metadata),
        clean_up_tokenization_spaces=False,
    )


def _byte_level(values: Mapping[str, Any], where: str) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, whose merges are listed; and whether BOS is added by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = values.get("pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ValueError(f"{where}: pre-tokenizer '{name}' is not supported; supported: {', '.join(_PRE_TOKENIZERS)}")
    if "merges" not in values:
        raise ValueError(f"{where}: {PREFIX}merges is missing, which a tokenizer model 'gpt2' needs")
    pre = _PRE_TOKENIZERS[name]
    vocab = {token: i for i, token in enumerate(values["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    if broken := [m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocab.keys()]:
        shown = [" ".join(merge) for merge in broken[:5]]
        raise ValueError(f"{where}: merges {shown} do not join two tokens into a third")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.regex), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(values: Mapping[str, Any], where: str) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: scores instead of merges, unknown characters in bytes, a space written `▁`.

    Text after a special token gets the leading space too, as in the models' own tokenizers and in llama.cpp.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if values.get(name):
            raise ValueError(f"{where}: {PREFIX}{name} is set, which is not supported for the tokenizer model 'llama'")
    if len(values.get("scores", ())) != len(values["tokens"]):
        raise ValueError(f"{where}: {PREFIX}scores must hold one score for each of {len(values['tokens'])} tokens")
    vocab = {token: i for i, token in enumerate(values["tokens"])}
    unknown = values.get("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(values["tokens"], values["scores"], values["token_type"]),
            unk_token=None if unknown is None else values["tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_prefix = values.get("add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if add_prefix else undo)
    return tokenizer, True


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the joined one's score deciding the order, as SentencePiece does.

    Only normal pieces take part: the others are matched whole, or not at all.
    """
    order = sorted((i for i, kind in enumerate(types) if kind == NORMAL), key=lambda i: (-scores[i], i))
    pieces = {tokens[i] for i in order}
    return [
        (piece[:cut], piece[cut:])
        for piece in (tokens[i] for i in order)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


_MODELS: dict[str, Callable[[Mapping[str, Any], str], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""`tokenizer.ggml.model` → what builds it."""


def _add_tokens(tokenizer: Tokenizer, values: Mapping[str, Any]) -> None:
    """Mark the tokens that text is searched for before anything else, of which decoding can skip the special ones."""
    from tokenizers import AddedToken

    added = {i: kind for i, kind in enumerate(values["token_type"]) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    tokenizer.add_tokens(
        [AddedToken(values["tokens"][i], special=kind != USER_DEFINED, normalized=False) for i, kind in added.items()]
    )


def _special_tokens(values: Mapping[str, Any], where: str) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {}
    for key, name in names.items():
        token_id = values.get(f"{key}_token_id")
        if token_id is None:
            continue
        if token_id >= len(values["tokens"]):
            raise ValueError(f"{where}: {PREFIX}{key}_token_id is {token_id}; there are {len(values['tokens'])} tokens")
        found[name] = values["tokens"][token_id]
    return found


def _default(values: Mapping[str, Any], name: str, otherwise: bool, where: str) -> bool:
    """Whether the token is added to a plain text."""
    add = values.get(f"add_{name}_token", otherwise)
    if add and f"{name}_token_id" not in values:
        raise ValueError(
            f"{where}: {name.upper()} is to be added to every text, but {PREFIX}{name}_token_id is missing"
        )
    return add


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template; where there are several, all by name, the unnamed one being `default`."""
    key = "tokenizer.chat_template"
    templates = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    if key not in metadata:
        return templates or None
    return {"default": metadata[key], **templates} if templates else metadata[key]
