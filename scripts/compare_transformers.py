"""Decode speed of transformers + torch on the CPU, to set beside `jaxinfer bench latency`.

Needs an environment of its own with torch and transformers, which jaxinfer itself does not use. Without --model it
makes a Llama of SmolLM2-135M's shape with random weights: speed does not depend on their values.

    python scripts/compare_transformers.py --batch-size 1 --batch-size 16
    jaxinfer bench latency --config smollm2-135m --random-weights --dtype float32 --batch-size 16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import transformers

SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; default: SmolLM2-135M's shape, random weights")
    parser.add_argument("--batch-size", type=int, action="append", help="may be repeated; default: 1 and 16")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one JSON object per batch size")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.model)
    for batch_size in args.batch_size or [1, 16]:
        result = measure(model, batch_size, args.input_len, args.output_len, args.repeats)
        result |= {"torch": torch.__version__, "transformers": transformers.__version__, "threads": args.threads}
        if args.json:
            print(json.dumps(result))
        else:
            print(
                f"batch {batch_size:<3} {result['decode_tokens_per_s']:.1f} tokens/s, "
                f"{result['decode_step_ms']:.2f} ms per step, first token after {result['time_to_first_token']:.3f} s"
            )


def load(path: str | None) -> Any:
    """The model in float32, for inference."""
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2_135M)).eval()


@torch.inference_mode()
def measure(model: Any, batch_size: int, input_len: int, output_len: int, repeats: int) -> dict[str, Any]:
    """Greedy decode with the model's own cache, once to warm up and `repeats` times measured; medians.

    The loop is written out rather than `generate`, whose overhead per step is not the model's.
    """
    ids = torch.randint(model.config.vocab_size, (batch_size, input_len), generator=torch.Generator().manual_seed(0))
    first, steps = [], []
    for repeat in range(repeats + 1):
        cache = transformers.DynamicCache(config=model.config)
        start = time.perf_counter()
        out = model(ids, cache=cache, logits_to_keep=1)
        after_first = time.perf_counter()
        for _ in range(output_len - 1):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(token, cache=cache, logits_to_keep=1)
        end = time.perf_counter()
        if repeat:
            first.append(after_first - start)
            steps.append((end - after_first) / (output_len - 1))
    step = statistics.median(steps)
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "time_to_first_token": statistics.median(first),
        "decode_step_ms": step * 1e3,
        "decode_tokens_per_s": batch_size / step,
    }


if __name__ == "__main__":
    main()
