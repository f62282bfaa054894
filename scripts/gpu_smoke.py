"""One GPU: is it right? (For speed: scripts/bench_step.py, scripts/bench_kernels.py.)

    python scripts/gpu_smoke.py [--model PATH] [--json FILE]

1. Tiny random models in float32 against what transformers computes for them (tests/goldens).
2. A small bfloat16 model on the kernels against the same on XLA, for every dtype of cache and weights.
3. With --model, a chat model's answer to "What is the capital of France?".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer import LLM, SamplingParams, compilation
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.engine import step
from pallas_kernels.target import Target
from tests import tiny

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
SMALL = ModelConfig(
    family="llama", vocab_size=1000, hidden_size=1024, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=128,
    mlp_size=2048, max_position=1024, rope=RopeConfig(),
)  # fmt: skip
CASES = ("llama", "llama_yarn", "mistral_window", "qwen2", "qwen3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat checkpoint to ask for the capital of France")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    device = jax.devices()[0]
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    results["parity"] = {name: check_parity(name) for name in CASES}
    cases = [("auto", None), ("int8", None), ("fp8", None), ("auto", "int8"), ("auto", "int4"), ("fp8", "fp8")]
    results["kernels"] = {f"{cache} {weights}": check_kernels(cache, weights) for cache, weights in cases}
    if args.model:
        results["answer"] = check_answer(args.model)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def check_parity(name: str) -> float:
    """The largest difference of a log-probability; exits if it or the greedy ids are off."""
    golden = np.load(GOLDENS / f"{name}.npz")
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_checkpoint(name, Path(folder))
        llm = LLM(
            folder, dtype="float32", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=2, page_size=16,
            max_num_batched_tokens=64, num_pages=32, warm_up=False, progress=False,
        )  # fmt: skip
    greedy = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    prompts = [{"prompt_token_ids": golden[key].tolist()} for key in ("greedy_prompt_ids", "prompt_ids")]
    output, prompt = llm.generate(prompts, [greedy, scored])
    difference = float(np.abs(prompt.prompt_logprobs - golden["logprobs"]).max())
    same = output.outputs[0].token_ids == golden["greedy_ids"].tolist()
    print(f"{name}: largest log-probability difference {difference:.1e}, greedy ids equal: {same}", flush=True)
    if difference > 1e-4 or not same:
        sys.exit(f"{name} differs from its reference")
    return difference


def check_kernels(cache_dtype: str, quantization: str | None) -> float:
    """The same bfloat16 model on kernels and on XLA: the mean difference of a log-probability; exits if it is off."""
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_dtype": cache_dtype,
        "quantization": quantization,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "num_pages": 64,
        "warm_up": False,
        "progress": False,
    }
    prompts = [{"prompt_token_ids": np.random.default_rng(n).integers(0, 1000, n).tolist()} for n in (300, 65, 3)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=-1, logprobs=-1)
    kernels = LLM(SMALL, **settings)
    with unittest.mock.patch.object(step, "target_of", return_value=Target("gpu")):
        xla = LLM(SMALL, **settings)
        wanted = xla.generate(prompts, params)
    got = kernels.generate(prompts, params)
    differences = []
    for one, other in zip(got, wanted, strict=True):
        differences.append(np.abs(one.prompt_logprobs - other.prompt_logprobs).mean())
        # Once a token differs, so does all that follows.
        same = np.cumprod(np.array(one.outputs[0].token_ids) == other.outputs[0].token_ids)
        rows = 1 + int(same.sum()) if same.sum() < len(same) else len(same)
        differences.append(np.abs(one.outputs[0].logprobs[:rows] - other.outputs[0].logprobs[:rows]).mean())
    difference = float(np.max(differences))
    print(f"kernels, cache {cache_dtype}, weights {quantization}: mean difference {difference:.1e}", flush=True)
    if not difference < 0.02:  # rounding alone gives 0.006 to 0.009
        sys.exit("the kernels differ from XLA")
    return difference


def check_answer(model: str) -> str:
    llm = LLM(model, max_model_len=1024, max_num_seqs=1, warm_up=False)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = llm.chat(question, SamplingParams(max_tokens=32, temperature=0.0))
    answer = output.outputs[0].text
    print(f"answer: {answer!r} ({output.outputs[0].finish_reason})", flush=True)
    return answer


if __name__ == "__main__":
    compilation.enable_cache()
    main()
