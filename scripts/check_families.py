"""Does each family compute on this machine what transformers computed?

    python scripts/check_families.py [--only PATTERN] [--tensor-parallel 2]

Every tiny checkpoint of the tests, in two files, in float32 against its golden (tests/goldens): log-probabilities after
each token of a prompt that is prefilled in chunks, and the greedy tokens; of encoders, a text's vector. Exit status 1
if one is wrong or fails. (For kernels in bfloat16 and 8 bits: scripts/gpu_smoke.py and scripts/check_kernels.py.)
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer import LLM, SamplingParams
from scripts.processes import share
from tests import tiny, tiny_families

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
TOLERANCE = 2e-4
"""Of a log-probability; of an element of a vector of length 1, a tenth."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "warm_up": False,
    "progress": False,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="checkpoints whose name holds this regular expression"
    )
    parser.add_argument("--processes", type=int, default=8, help="that share the work, and the device (default 8)")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices that share a model")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    chosen = [name for name in tiny.EVERY_CASE if re.search(args.only, name)]
    if not chosen:
        parser.error(f"no checkpoint has a name like {args.only!r}")
    start, count = time.perf_counter(), min(args.processes, len(chosen))
    if args.part is None and count > 1:
        failures = sum(
            share(Path(__file__), ["--only", args.only, "--tensor-parallel", str(args.tensor_parallel)], count)
        )
        print(
            f"{len(chosen)} checkpoints in {time.perf_counter() - start:.0f} s: {'WRONG' if failures else 'all right'}"
        )
    else:
        failures = sum(not report(name, args.tensor_parallel) for name in chosen[args.part or 0 :: count])
    sys.exit(failures > 0)


def report(name: str, devices: int) -> bool:
    """Whether it is right, printed."""
    encoder = name in tiny_families.ENCODERS
    tolerance = TOLERANCE / 10 if encoder else TOLERANCE
    try:
        found, same = difference(name, tensor_parallel_size=devices)
    except Exception as failure:  # the others say something all the same
        print(f"{name:<24} {type(failure).__name__}: {failure}".splitlines()[0], flush=True)
        return False
    finally:
        jax.clear_caches()
    right = found <= tolerance and same
    verdict = "ok" if right else "WRONG" if same else "WRONG: other tokens"
    print(f"{name:<24} difference {found:.1e}, at most {tolerance:.0e}  {verdict}", flush=True)
    return right


def difference(name: str, **settings: Any) -> tuple[float, bool]:
    """The largest, and whether the greedy tokens are the same."""
    return vector(name, **settings) if name in tiny_families.ENCODERS else generation(name, **settings)


def load(name: str, **settings: Any) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        return LLM(str(tiny.write_checkpoint(name, Path(folder), shards=2)), **SETTINGS | settings)


def generation(name: str, **settings: Any) -> tuple[float, bool]:
    """The largest difference of a log-probability, and the tokens."""
    with np.load(GOLDENS / f"{name}.npz") as golden:
        expected, greedy = golden["logprobs"], golden["greedy_ids"].tolist()
        prompts = [{"prompt_token_ids": golden[key].tolist()} for key in ("prompt_ids", "greedy_prompt_ids")]
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    continued = SamplingParams(max_tokens=len(greedy), temperature=0.0, ignore_eos=True)
    score, output = load(name, **settings).generate(prompts, [scored, continued])
    return float(np.abs(score.prompt_logprobs - expected).max()), output.outputs[0].token_ids == greedy


def vector(name: str, **settings: Any) -> tuple[float, bool]:
    """The largest difference of an element."""
    with np.load(GOLDENS / f"hidden_{name}.npz") as golden:
        prompt, expected = golden["prompt_ids"].tolist(), golden["mean"]
    [output] = load(name, max_model_len=64, **settings).embed({"prompt_token_ids": prompt}, pooling="mean")
    return float(np.abs(output.embedding - expected).max()), True


if __name__ == "__main__":
    main()
