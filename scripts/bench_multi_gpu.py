"""Tensor parallelism on the GPUs of one host: first correctness, then what it gains and where the time goes.

    python scripts/bench_multi_gpu.py [--tensor N] [--config NAME] [--json FILE] [--correctness-only]

1. Tiny random models in float32 with 8, 2 and 1 kv heads: tensor N gives the tokens of tensor 1, one by one.
2. A model of the demo's size from a sharded checkpoint, likewise.
3. All-reduce: microseconds of one in a chain of 64, as a decode step has them, by rows of 4096 bfloat16 values.
4. Decode steps (640 tokens of context) and a prefill of 2048 tokens with random bfloat16 weights on 1 and on N GPUs,
   the share of a step's time spent in all-reduces (profiled without CUDA graphs), and bytes of weights and cache on
   each device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxinfer import LLM, SamplingParams, compilation
from jaxinfer.engine.batch import Batch
from jaxinfer.presets import PRESETS
from meshes import build_mesh
from scripts.step_timing import StepBench

KV_HEADS = (8, 2, 1)
ROWS, WIDTH, CHAIN = (1, 8, 32, 128, 2048), 4096, 64
BATCHES, CONTEXT, PREFILL, STEPS = (1, 32, 128), 640, 2048, 30
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 251, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEMO_SIZED = {
    **TINY, "vocab_size": 49152, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=len(jax.devices()), help="GPUs to share each layer (default all)")
    parser.add_argument("--config", default="llama-3-8b", choices=sorted(PRESETS), help="shape to time")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--correctness-only", action="store_true")
    args = parser.parse_args()
    start = time.perf_counter()
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "tensor": args.tensor, "jax": jax.__version__}
    for kv_heads in KV_HEADS:
        check_equal(f"tiny model, {kv_heads} kv heads", {**TINY, "num_key_value_heads": kv_heads}, 1, args.tensor)
    check_equal("demo-sized model, 3 files", DEMO_SIZED, 3, args.tensor)
    if not args.correctness_only:
        results["all_reduce_us"] = time_all_reduce(args.tensor)
        results["steps"] = [time_steps(args.config, tensor) for tensor in sorted({1, args.tensor})]
        print_table(results)
    print(f"done in {time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def check_equal(name: str, hf_config: dict[str, Any], files: int, tensor: int) -> None:
    """Greedy ids of a random checkpoint on 1 and on `tensor` devices; exits if they differ."""
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 17, 40)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ids = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(hf_config, Path(folder), files)
        for size in (1, tensor):
            llm = LLM(
                folder, dtype="float32", tensor_parallel_size=size, skip_tokenizer_init=True, max_model_len=128,
                max_num_seqs=4, max_num_batched_tokens=64, page_size=16, num_pages=32, warm_up=False, progress=False,
            )  # fmt: skip
            ids.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    same = ids[0] == ids[1]
    print(f"{name}: tensor {tensor} {'equals' if same else 'DIFFERS FROM'} tensor 1", flush=True)
    if not same:
        sys.exit(1)


def write_random_checkpoint(hf_config: dict[str, Any], folder: Path, files: int) -> None:
    """A Hugging Face llama checkpoint of float32 noise, its tensors dealt over `files` files."""
    rng = np.random.default_rng(0)
    c = hf_config
    embed, mlp, head_dim = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    kv = c["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], embed), "model.norm.weight": (embed,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], embed)
    for layer in range(c["num_hidden_layers"]):
        rows = {
            "self_attn.q_proj": (embed, embed),
            "self_attn.k_proj": (kv, embed),
            "self_attn.v_proj": (kv, embed),
            "self_attn.o_proj": (embed, embed),
            "mlp.gate_proj": (mlp, embed),
            "mlp.up_proj": (mlp, embed),
            "mlp.down_proj": (embed, mlp),
            "input_layernorm": (embed,),
            "post_attention_layernorm": (embed,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in rows.items()}
    tensors = {
        name: (
            1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else rng.standard_normal(shape) * shape[1] ** -0.5
        )
        for name, shape in shapes.items()
    }
    weight_map = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t.astype(np.float32) for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(hf_config))


def time_all_reduce(tensor: int) -> dict[int, float]:
    """Rows → microseconds of one all-reduce of [rows, WIDTH] bfloat16 in a chain."""
    mesh, result = build_mesh(tensor=tensor), {}
    for rows in ROWS:
        x = jnp.zeros((rows, WIDTH), jnp.bfloat16)
        chain = jax.jit(functools.partial(all_reduce_chain, mesh=mesh))
        jax.block_until_ready(chain(x))
        start = time.perf_counter()
        jax.block_until_ready([chain(x) for _ in range(STEPS)])
        result[rows] = (time.perf_counter() - start) / STEPS / CHAIN * 1e6
    return result


def all_reduce_chain(x: jax.Array, mesh: Mesh) -> jax.Array:
    """CHAIN all-reduces, each waiting for the one before."""

    def body(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            x = jax.lax.psum(x, "tensor") * jnp.bfloat16(0.5)
        return x

    return jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(x)


def time_steps(config: str, tensor: int) -> dict[str, Any]:
    mesh = build_mesh(tensor=tensor)
    bench = StepBench(PRESETS[config], mesh, max(BATCHES), CONTEXT, PREFILL)
    batches: dict[str, Batch] = {f"decode {size}": bench.decode_batch(size) for size in BATCHES}
    batches[f"prefill {PREFILL}"] = bench.prefill_batch(PREFILL)
    start = time.perf_counter()
    bench.runner.compile([batch.shape for batch in batches.values()])
    print(f"tensor {tensor}: compiled {len(batches)} shapes in {time.perf_counter() - start:.0f} s", flush=True)
    rows: dict[str, Any] = {}
    for name, batch in batches.items():
        rows[name] = dataclasses.asdict(bench.time(batch, STEPS))
        if tensor > 1 and jax.default_backend() == "gpu":
            rows[name]["all_reduce_share"] = all_reduce_share(bench, batch)
    assert bench.runner.state is not None
    return {
        "tensor": tensor,
        "steps": rows,
        "weight_bytes": bytes_per_device(bench.weights),
        "cache_bytes": bytes_per_device(bench.runner.state.cache),
    }


def all_reduce_share(bench: StepBench, batch: Batch) -> float:
    """Share of the kernels' time on the first GPU that all-reduces take, waiting for the others included."""
    kernels = {name: ms for name, (ms, _) in bench.profile(batch).items()}
    plain = {name.lower().replace("_", "").replace("-", ""): ms for name, ms in kernels.items()}
    return sum(ms for name, ms in plain.items() if "allreduce" in name) / sum(plain.values())


def bytes_per_device(tree: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            sizes[str(shard.device)] = sizes.get(str(shard.device), 0) + shard.data.nbytes
    return sizes


def print_table(results: dict[str, Any]) -> None:
    print("\nall-reduce of rows x 4096 bf16, us each: ", end="")
    print(", ".join(f"{rows}: {us:.1f}" for rows, us in results["all_reduce_us"].items()))
    for run in results["steps"]:
        print(f"\ntensor {run['tensor']}   weights, GB a device: {_gigabytes(run['weight_bytes'])}", end="")
        print(f"   cache, GB a device: {_gigabytes(run['cache_bytes'])}")
        print(f"{'step':<16}{'ms':>9}{'host ms':>9}{'all-reduce':>12}{'speed-up':>10}")
        for name, row in run["steps"].items():
            share = f"{row['all_reduce_share']:.1%}" if "all_reduce_share" in row else "-"
            gain = results["steps"][0]["steps"][name]["step_ms"] / row["step_ms"]
            print(f"{name:<16}{row['step_ms']:>9.2f}{row['host_ms']:>9.2f}{share:>12}{gain:>10.2f}")


def _gigabytes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{size / 1e9:.3f}" for size in sizes.values())


if __name__ == "__main__":
    compilation.enable_cache()
    main()
