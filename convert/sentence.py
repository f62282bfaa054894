"""How a model's hidden states become the vector of a text, as the files of sentence-transformers beside it say."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from convert.families.fields import Fields
from convert.manifest import HUGGING_FACE
from convert.shards import load_json

type Pooling = Literal["cls", "mean", "last"]

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
LENGTHS = tuple(
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names that sentence-transformers gave one file over time; the first that is there is read."""
_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_OTHER_FLAGS = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_MODES: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Values of `pooling_mode`, which newer files have instead of the flags."""


@dataclass(frozen=True)
class TextConfig:
    """What is done with a text before its tokens reach the model."""

    max_length: int | None = None
    """Longest text in tokens that the model was tuned for; None: not said."""
    strip: bool = False
    """Leave out white space around it, the prefix included."""
    lower_case: bool = False
    """Of the prefix, too."""
    prefix: str = ""

    def applied(self, text: str) -> str:
        """What the tokenizer is given for a text; in the order of sentence-transformers."""
        text = self.prefix + text
        text = text.strip() if self.strip else text
        return text.lower() if self.lower_case else text


def text_config(path: Path) -> TextConfig:
    """Of a Hugging Face or native folder; as it is by default if there are no such files.

    Raises ValueError, naming the file, for one that is malformed.
    """
    folder = _folder(path)
    if folder is None:
        return TextConfig()
    file = next((folder / name for name in LENGTHS if (folder / name).is_file()), folder / LENGTHS[0])
    lengths = _fields(file)
    longest = None if lengths.get("max_seq_length") is None else lengths.integer("max_seq_length")
    return TextConfig(longest, True, lengths.boolean("do_lower_case", False), _prefix(_fields(folder / PROMPTS)))


def pooling_config(path: Path) -> tuple[Pooling, bool] | None:
    """The pooling, and whether vectors are scaled to length 1; None if there are no such files.

    Raises ValueError, naming the file, for a pooling or a module that is not supported.
    """
    folder = _folder(path)
    if folder is None:
        return None
    pooling: Pooling | None = None
    normalize = False
    for module in _modules(folder):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_fields(folder / str(module.get("path")) / "config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ValueError(
                f"{folder / MODULES} has a module '{kind}', which is not supported; supported: Transformer, Pooling, "
                "Normalize. Pass pooling and normalize to have vectors without it"
            )
    if pooling is None:
        raise ValueError(f"{folder / MODULES} has no module 'Pooling'; pass pooling and normalize")
    return pooling, normalize


def copy_sentence_files(path: Path, folder: Path) -> None:
    """What is read here, if it is there, from one Hugging Face or native folder to another folder."""
    source = _folder(path)
    if source is None:
        return
    inner = [f"{module['path']}/config.json" for module in _modules(source) if module.get("path")]
    for name in (MODULES, *LENGTHS, PROMPTS, *inner):
        file = source / name
        if file.is_file() and file.resolve().is_relative_to(source.resolve()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / name)


def _folder(path: Path) -> Path | None:
    return next((folder for folder in (path / HUGGING_FACE, path) if (folder / MODULES).is_file()), None)


def _modules(folder: Path) -> list[dict[str, Any]]:
    modules = load_json((folder / MODULES).read_bytes(), str(folder / MODULES))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{folder / MODULES} holds no list of modules")
    return modules


def _fields(file: Path) -> Fields:
    """Of a file; of one that is not there, none."""
    values = load_json(file.read_bytes(), str(file)) if file.is_file() else {}
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no object")
    return Fields(values, str(file))


def _prefix(fields: Fields) -> str:
    """The prompt that goes before texts unless another is asked for."""
    name, prompts = fields.get("default_prompt_name"), fields.get("prompts") or {}
    if name is None:
        return ""
    texts = isinstance(prompts, dict) and all(isinstance(prompt, str) for prompt in prompts.values())
    if not texts or not isinstance(name, str):
        raise ValueError(f"{fields.where}: 'prompts' must map names to texts, and 'default_prompt_name' be one of them")
    return fields.choice("default_prompt_name", name, prompts)


def _pooling(fields: Fields) -> Pooling:
    for name in _OTHER_FLAGS:
        fields.expect(name, False)
    fields.expect("include_prompt", True)
    fields.ignore(["word_embedding_dimension", "embedding_dimension"])
    mode = fields.get("pooling_mode")
    chosen = [pooling for name, pooling in _FLAGS.items() if fields.boolean(name, False)]
    fields.finish()
    if mode is not None:
        return fields.choice("pooling_mode", mode, _MODES)
    if len(chosen) != 1:
        raise ValueError(f"{fields.where} chooses {len(chosen)} ways of pooling; supported: one of {', '.join(_FLAGS)}")
    return chosen[0]
