"""Write tests/goldens/<case>.npz: what transformers computes for every tiny checkpoint of tests/tiny.py.

Needs torch, which nothing else here does, so it goes in two steps, each in an environment of its own if need be:

    python scripts/make_goldens.py write FOLDER [CASE …]      the project's: checkpoints to FOLDER/<case>
    python scripts/make_goldens.py compute FOLDER [CASE …]    `pip install torch transformers safetensors numpy`

The files in the repository were computed with torch 2.13.0 on CPU and transformers 5.24. transformers must use every
tensor and miss none. What it does not have is computed by scripts/plain_models.py, which must use every tensor too.

The cases called `hidden_<case>` are of embeddings: `prompt_ids [T]`, `hidden [T, embed]` (the last hidden states) and
`cls`, `mean` and `last` [embed], pooled and scaled to length 1.

A golden of the others holds `prompt_ids [T]`, `logprobs [T, vocab]` (float32 log-softmax after each prompt token),
`greedy_prompt_ids`, `greedy_ids` (argmax continuation), `greedy_margins` (best logit minus the second best) and
`weights_sha256`.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GREEDY_PROMPT_TOKENS = 7
FEWEST_IDS = 4
Logits = Callable[[NDArray[np.integer]], NDArray[np.float64]]
"""Ids [tokens] to logits [tokens, vocab]."""
HIDDEN = ("qwen3",)
"""Decoders whose hidden states are wanted too."""
SMALLEST_MARGIN = 3e-3  # far above what float32 rounding moves a logit, so that greedy ids are the same everywhere


def write(folder: Path, cases: list[str]) -> None:
    from tests import tiny, tiny_families

    hidden = [f"hidden_{case}" for case in (*tiny_families.ENCODERS, *HIDDEN)]
    for name in cases or [*tiny.ALL_CASES, *hidden]:
        if name in hidden:
            case = name.removeprefix("hidden_")
            tiny.write_checkpoint(case, folder / name)
            wanted = {"prompt": 40, "attention": "eager", "weights_sha256": tiny.sha256(tiny.weights(case))}
            (folder / name / "golden.json").write_text(json.dumps(wanted))
            continue
        tiny.write_checkpoint(name, folder / name)
        sizes: dict[str, Any] = (
            {"prompt": 40, "greedy": 16} if name in tiny_families.CASES else {"prompt": 88, "greedy": 32}
        )
        digest = tiny.sha256(tiny.weights(name))
        # transformers' eager Falcon adds ALiBi twice, to the scores and to the mask.
        sizes["attention"] = "sdpa" if tiny.ALL_CASES[name].get("alibi") else "eager"
        (folder / name / "golden.json").write_text(json.dumps({**sizes, "weights_sha256": digest}))


def of_transformers(folder: Path, attention: str) -> Logits:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    info["missing_keys"] -= dict(model.named_buffers()).keys()  # which transformers computes, where they are not stored
    if odd := {key: value for key, value in info.items() if value}:
        raise ValueError(f"{folder.name}: the checkpoint is not what transformers expects: {odd}")
    model.eval()

    def logits(ids: NDArray[np.integer]) -> NDArray[np.float64]:
        return model(torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0].detach().double().numpy()

    return logits


def of_plain_model(folder: Path, config: dict[str, Any]) -> Logits:
    from safetensors.numpy import load_file

    from scripts.plain_models import MODELS

    class Used(dict):
        """Remembers which tensors were asked for."""

        def __getitem__(self, name: str) -> NDArray[np.float64]:
            unused.discard(name)
            return super().__getitem__(name)

    tensors = Used(
        {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    unused = set(tensors)
    MODELS[config["model_type"]](config, tensors, np.arange(64))
    if unused:
        raise ValueError(f"{folder.name}: the checkpoint is not what plain_models expects: {unused}")
    return lambda ids: MODELS[config["model_type"]](config, tensors, ids)


def make_golden(folder: Path) -> dict[str, np.ndarray]:
    from scripts.plain_models import MODELS

    name, wanted = folder.name, json.loads((folder / "golden.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    plain = config["model_type"] in MODELS
    logits_of = of_plain_model(folder, config) if plain else of_transformers(folder, wanted["attention"])
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(b"prompt " + name.encode())))
    vocab = config["vocab_size"]
    prompt = (rng.random(wanted["prompt"]) * vocab).astype(np.int32)
    logits = logits_of(prompt)
    margins, ids = np.zeros(1), np.zeros(1)
    while margins.min() < SMALLEST_MARGIN or len(set(ids.tolist())) < FEWEST_IDS:
        greedy_prompt = (rng.random(GREEDY_PROMPT_TOKENS) * vocab).astype(np.int32)
        ids, margins = greedy(logits_of, greedy_prompt, wanted["greedy"])
    print(
        f"{name}: logits std {logits.std(-1).min():.2f}..{logits.std(-1).max():.2f}, "
        f"smallest greedy margin {margins.min():.4f}, {len(set(ids.tolist()))} different ids"
    )
    return {
        "prompt_ids": prompt,
        "logprobs": log_softmax(logits).astype(np.float32),
        "greedy_prompt_ids": greedy_prompt,
        "greedy_ids": ids,
        "greedy_margins": margins,
        "weights_sha256": np.array(wanted["weights_sha256"]),
    }


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def make_hidden(folder: Path) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoModel

    name, wanted = folder.name, json.loads((folder / "golden.json").read_text())
    model, info = AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=wanted["attention"], output_loading_info=True
    )
    odd = {key: [each for each in value if not each.startswith(("pooler.", "lm_head."))] for key, value in info.items()}
    if any(odd.values()):
        raise ValueError(f"{name}: the checkpoint is not what transformers expects: {odd}")
    model.eval()
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(b"prompt " + name.encode())))
    prompt = (4 + rng.random(wanted["prompt"]) * (model.config.vocab_size - 4)).astype(np.int32)  # no padding among it
    hidden = model(torch.tensor(prompt[None].astype(np.int64))).last_hidden_state[0].detach().double()
    pooled = {"cls": hidden[0], "mean": hidden.mean(0), "last": hidden[-1]}
    print(f"{name}: hidden states std {hidden.std():.2f}, of a dimension over the tokens {hidden.std(0).mean():.2f}")
    return {
        "prompt_ids": prompt,
        "hidden": hidden.float().numpy(),
        **{pooling: (vector / vector.norm()).float().numpy() for pooling, vector in pooled.items()},
        "weights_sha256": np.array(wanted["weights_sha256"]),
    }


def greedy(logits_of: Logits, prompt: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and margins of the argmax continuation, each from a full forward without a cache; end ids are not heeded."""
    ids, margins = prompt, []
    for _ in range(tokens):
        last = logits_of(ids)[-1]
        best = np.argsort(-last)[:2]
        margins.append(last[best[0]] - last[best[1]])
        ids = np.append(ids, best[:1].astype(np.int32))
    return ids[len(prompt) :], np.array(margins, np.float32)


def compute(folder: Path, cases: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    for name in cases or sorted(path.name for path in folder.iterdir()):
        make = make_hidden if name.startswith("hidden_") else make_golden
        np.savez_compressed(ROOT / "tests" / "goldens" / f"{name}.npz", **make(folder / name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("write", "compute"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", help="names in tests/tiny.py; default: all")
    arguments = parser.parse_args()
    {"write": write, "compute": compute}[arguments.step](arguments.folder, arguments.cases)


if __name__ == "__main__":
    main()
