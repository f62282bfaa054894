"""What the device scripts share: steps of a model with random weights on a mesh, without an engine around them."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, Quantization
from jaxinfer.engine import cache
from jaxinfer.engine.batch import KERNEL_WIDTHS, Batch, BatchBuilder
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import Scheduled
from jaxinfer.engine.step import State, StepRunner, target_of
from jaxinfer.parameters import for_tensor_parallel
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.startup import load_model
from meshes import sharding

PAGE_SIZE = 64
DTYPE = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class StepTime:
    """Milliseconds from one step to the next, the host running ahead, and what the host takes to dispatch one."""

    step_ms: float
    host_ms: float


class StepBench:
    """Random bfloat16 or quantized weights and an empty cache on a mesh, ready to time batches."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        max_batch: int,
        context: int,
        prefill_tokens: int = 2048,
        quantization: Quantization | None = None,
        cache_dtype: Literal["auto", "int8", "fp8"] = "auto",
        untimed: bool = False,
        quantize_activations: bool = False,
    ):
        """context: tokens in the cache of each decoding sequence; untimed: as in Target."""
        self.context = context
        self.config = for_tensor_parallel(config, mesh.shape["tensor"])
        loaded = load_model(config, mesh, "bfloat16", quantization, 0, False, quantize_activations)
        self.weights = jax.block_until_ready(loaded.weights)
        engine = EngineConfig(
            max_model_len=config.max_position, max_num_seqs=max_batch, max_num_batched_tokens=prefill_tokens,
            cache=CacheConfig(PAGE_SIZE, dtype=cache_dtype),
        )  # fmt: skip
        self.builder = BatchBuilder(engine, groups=1, data_dependent=False, widths=KERNEL_WIDTHS)
        target = dataclasses.replace(target_of(mesh), untimed=untimed)
        self.runner = StepRunner(self.config, self.weights, mesh, target)
        self.page_size, self.num_pages = (
            PAGE_SIZE,
            max(max_batch * -(-context // PAGE_SIZE), prefill_tokens // PAGE_SIZE),
        )
        stored = cache.stored_dtype(cache_dtype, DTYPE)
        abstract = cache.abstract_cache(self.config, (self.num_pages,), PAGE_SIZE, stored, mesh)
        last_ids = jax.device_put(jnp.zeros(max_batch, jnp.int32), sharding(mesh))
        self.runner.state = State(cache.allocate(abstract), last_ids)

    def decode_batch(self, size: int) -> Batch:
        """`size` sequences about to decode the last token of their context, their pages shuffled over the pool."""
        pages = -(-self.context // PAGE_SIZE)
        shuffled = np.random.default_rng(0).permutation(size * pages).reshape(size, pages)
        parts = [_part(slot, shuffled[slot].tolist(), self.context - 1, 1) for slot in range(size)]
        return self.builder.build(parts)

    def prefill_batch(self, tokens: int) -> Batch:
        """One prompt of `tokens` tokens, from an empty cache."""
        return self.builder.build([_part(0, list(range(-(-tokens // PAGE_SIZE))), 0, tokens)])

    def time(self, batch: Batch, steps: int) -> StepTime:
        jax.block_until_ready([self.runner.run(batch) for _ in range(3)])
        # The runtime makes the host wait once too many steps are in flight: its own time shows in the first few.
        few, start = min(steps, 4), time.perf_counter()
        outputs = [self.runner.run(batch) for _ in range(few)]
        host = (time.perf_counter() - start) / few
        outputs += [self.runner.run(batch) for _ in range(steps - few)]
        jax.block_until_ready(outputs)
        return StepTime((time.perf_counter() - start) / steps * 1e3, host * 1e3)

    def profile(self, batch: Batch, steps: int = 3) -> dict[str, tuple[float, float]]:
        """Kernel → milliseconds a step takes in it on the first GPU, and launches.

        Of a program without CUDA graphs, whose kernels the profiler sees one by one. Numbers in names are left out, so
        that the kernels of all layers add up.
        """
        state = self.runner.state
        program = self.runner.lower(batch.shape, state).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
        packed = batch.pack()
        output, state = jax.block_until_ready(program(self.weights, state, packed))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(steps):
                    output, state = program(self.weights, state, packed)
                jax.block_until_ready(output)
            [file] = Path(folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(file))
        self.runner.state = state
        times: Counter[str] = Counter()
        launches: Counter[str] = Counter()
        for plane in profile.planes:
            if plane.name == "/device:GPU:0":
                for line in plane.lines:
                    for event in line.events if line.name.startswith("Stream") else ():
                        name = re.sub(r"[\d_.]+", "_", event.name)
                        times[name] += event.duration_ns / 1e6 / steps
                        launches[name] += 1 / steps
        return {name: (times[name], launches[name]) for name in times}


def _part(slot: int, pages: list[int], start: int, count: int) -> Scheduled:
    params = SamplingParams(temperature=0.0)
    request = Request(str(slot), [1] * (start + count), params, max_total_tokens=2 * (start + count), seed=0, slot=slot)
    request.pages = [pages]
    return Scheduled(request, start, count, samples=True)
