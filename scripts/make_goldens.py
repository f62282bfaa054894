"""Write tests/goldens/<case>.npz: what transformers computes for every tiny checkpoint of tests/tiny.py.

Needs torch, which nothing else here does: `pip install torch transformers safetensors numpy ml_dtypes` (the files in
the repository were made with torch 2.13.0 on CPU and transformers 5.24). Then run it, from anywhere:
`python scripts/make_goldens.py [CASE …]`.

A golden holds `prompt_ids [T]`, `logprobs [T, vocab]` (float32 log-softmax after each prompt token),
`greedy_prompt_ids`, `greedy_ids` (argmax continuation), `greedy_margins` (best logit minus the second best) and
`weights_sha256`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import tiny  # noqa: E402

PROMPT_TOKENS, GREEDY_PROMPT_TOKENS, GREEDY_TOKENS = 88, 7, 32
SMALLEST_MARGIN = 3e-3  # far above what float32 rounding moves a logit, so that greedy ids are the same everywhere


@torch.inference_mode()
def make_golden(name: str) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_checkpoint(name, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(b"prompt " + name.encode())))
    vocab = tiny.CASES[name]["vocab_size"]
    prompt = (rng.random(PROMPT_TOKENS) * vocab).astype(np.int32)
    logits = model(torch.tensor(prompt[None].astype(np.int64)), use_cache=False).logits[0].double()
    margins = np.zeros(1)
    while margins.min() < SMALLEST_MARGIN:
        greedy_prompt = (rng.random(GREEDY_PROMPT_TOKENS) * vocab).astype(np.int32)
        ids, margins = greedy(model, greedy_prompt)
    print(
        f"{name}: logits std {logits.std(-1).min():.2f}..{logits.std(-1).max():.2f}, "
        f"smallest greedy margin {margins.min():.4f}, {len(set(ids.tolist()))} different ids"
    )
    return {
        "prompt_ids": prompt,
        "logprobs": torch.log_softmax(logits, -1).float().numpy(),
        "greedy_prompt_ids": greedy_prompt,
        "greedy_ids": ids,
        "greedy_margins": margins,
        "weights_sha256": np.array(tiny.sha256(tiny.weights(name))),
    }


def greedy(model: torch.nn.Module, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and margins of the argmax continuation, each from a full forward without a cache; end ids are not heeded."""
    ids = torch.tensor(prompt[None].astype(np.int64))
    margins = []
    for _ in range(GREEDY_TOKENS):
        best = model(ids, use_cache=False).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[None, :1]], dim=1)
    return ids[0, len(prompt) :].numpy().astype(np.int32), np.array(margins, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names in tests/tiny.py; default: all")
    torch.set_num_threads(1)
    for name in parser.parse_args().cases or tiny.CASES:
        np.savez_compressed(ROOT / "tests" / "goldens" / f"{name}.npz", **make_golden(name))


if __name__ == "__main__":
    main()
