"""One GPU, first correctness, then the speed of a decode step.

    python scripts/gpu_smoke.py [--model PATH] [--json FILE]

1. Tiny random models in float32 against what transformers computes for them (tests/goldens).
2. With --model, a chat model's answer to "What is the capital of France?".
3. A Llama-3-8B shape with random bfloat16 weights: the decode step at 640 tokens of context and the prefill of 2048
   tokens; milliseconds from step to step with the host running ahead, how long the host took to dispatch one, and, from
   a profile, which kernels the time goes to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer import LLM, SamplingParams, compilation
from jaxinfer.presets import PRESETS
from jaxinfer.weights import size_in_bytes
from meshes import build_mesh
from scripts.step_timing import StepBench
from tests import tiny

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
CASES = ("llama", "llama_yarn", "mistral_window", "qwen2", "qwen3")
BATCHES = (1, 32, 128)
CONTEXT, PREFILL, STEPS = 640, 2048, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a chat checkpoint to ask for the capital of France")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--skip-speed", action="store_true", help="correctness only")
    args = parser.parse_args()
    device = jax.devices()[0]
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    results["parity"] = {name: check_parity(name) for name in CASES}
    if args.model:
        results["answer"] = check_answer(args.model)
    if not args.skip_speed:
        results["steps"] = time_steps()
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


def check_answer(model: str) -> str:
    llm = LLM(model, max_model_len=1024, max_num_seqs=1, warm_up=False)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = llm.chat(question, SamplingParams(max_tokens=32, temperature=0.0))
    answer = output.outputs[0].text
    print(f"answer: {answer!r} ({output.outputs[0].finish_reason})", flush=True)
    return answer


def time_steps() -> list[dict[str, float | str]]:
    config = PRESETS["llama-3-8b"]
    bench = StepBench(config, build_mesh(), max(BATCHES), CONTEXT)
    start = time.perf_counter()
    batches = {size: bench.decode_batch(size) for size in BATCHES}
    prefill = bench.prefill_batch(PREFILL)
    bench.runner.compile([batch.shape for batch in (*batches.values(), prefill)])
    print(f"compiled {len(batches) + 1} shapes in {time.perf_counter() - start:.0f} s", flush=True)
    weights, rows = size_in_bytes(bench.weights) / 1e9, list[dict[str, float | str]]()
    for size, batch in batches.items():
        timed = bench.time(batch, STEPS)
        kv = size * CONTEXT * config.kv_elements_per_token() * 2 / 1e9
        print(
            f"decode, batch {size}: {timed.step_ms:.2f} ms a step (host {timed.host_ms:.2f}), "
            f"{size / timed.step_ms * 1e3:.0f} tok/s, {(weights + kv) / timed.step_ms * 1e3:.0f} GB/s",
            flush=True,
        )
        kernels = by_kind(bench.profile(batch))
        print("    kernels: " + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in kernels.items()), flush=True)
        name = f"decode, batch {size}"
        rows.append({"step": name, **dataclasses.asdict(timed), "weights_gb": weights, "kv_gb": kv, **kernels})
    timed = bench.time(prefill, STEPS // 5)
    print(f"prefill of {PREFILL}: {timed.step_ms:.1f} ms, {PREFILL / timed.step_ms * 1e3:.0f} tok/s", flush=True)
    return [*rows, {"step": f"prefill {PREFILL}", **dataclasses.asdict(timed)}]


def by_kind(kernels: dict[str, float]) -> dict[str, float]:
    """Milliseconds by what kernels do; XLA's and cuBLAS's names tell."""
    kinds = {"matrix products": 0.0, "page gathers": 0.0, "other": 0.0}
    for name, ms in kernels.items():
        product = any(word in name for word in ("gemm", "nvjet", "cutlass", "dot"))
        kinds["matrix products" if product else "page gathers" if "gather_select" in name else "other"] += ms
    return kinds


if __name__ == "__main__":
    compilation.enable_cache()
    main()
