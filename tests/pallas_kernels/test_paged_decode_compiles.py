"""paged_decode compiles for H100 and H200 at production shapes, within registers, shared memory and temporaries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_pages import abstract_pages
from pallas_kernels.paged_decode import make_plan, paged_decode
from pallas_kernels.target import H200
from scripts.aot import compile_for_gpu

# gpu, cache dtype, head_dim, q heads per kv head, page size, queries, options, blocks that must fit on an SM
CASES = [
    ("h200", "bfloat16", 128, 4, 64, 1, {}, 2),
    ("h200", "float8_e4m3fn", 128, 8, 64, 1, {"soft_cap": 30.0, "window": 4096}, 4),
    ("h100", "float16", 80, 3, 32, 1, {}, 2),
    ("h200", "bfloat16", 256, 16, 16, 1, {"window": 512}, 1),
    ("h100", "int8", 128, 4, 64, 8, {}, 2),
    ("h200", "int8", 80, 4, 16, 1, {}, 4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_compiles(case):
    gpu, dtype, head_dim, group, page_size, queries, options, blocks = case
    batch, kv_heads = 64, 8
    shape = jax.ShapeDtypeStruct
    pages = abstract_pages(4096, kv_heads, page_size, head_dim, dtype)
    q = shape((batch, queries, kv_heads, group, head_dim), "float16" if dtype == "float16" else "bfloat16")
    lengths, tables = shape((batch,), jnp.int32), shape((batch, 2048), jnp.int32)
    kernel = {"target": H200, "implementation": "mosaic"}
    sizes = {"q_dtype": q.dtype, "q_per_kv": group, "queries": queries, "window": options.get("window")}
    plan = jax.eval_shape(
        functools.partial(make_plan, pages=pages, **sizes, **kernel),
        lengths,
        tables,
    )
    call = functools.partial(paged_decode, scale=head_dim**-0.5, **kernel, **options)
    compiled, kernels = compile_for_gpu(
        lambda q, pages, tables, lengths, plan: call(q, pages, tables, lengths, plan=plan),
        q, pages, tables, lengths, plan, gpu=gpu,
    )  # fmt: skip
    assert 0.95 * blocks * 132 <= plan.config.blocks <= blocks * 132
    assert len(kernels) == 1
    assert kernels[0].spilled_bytes == 0
    assert -(-kernels[0].registers // 8) * 8 * 128 * blocks <= 65536
    # Two unfinished rows of a block, and a transposed q and output if there are several queries.
    parts = 2 * plan.config.blocks * plan.config.columns * (max(head_dim, 128) + 2) * 4
    moved = 2 * batch * kv_heads * queries * group * head_dim * 2 if queries > 1 else 0
    assert compiled.memory_analysis().temp_size_in_bytes <= parts + moved + (1 << 16)


def test_the_plan_is_a_few_fusions():
    """Once a step, on its critical path: no sort, no scan, no loop."""
    pages = abstract_pages(4096, 8, 64, 128, "bfloat16")
    plan = functools.partial(make_plan, pages=pages, q_dtype=jnp.bfloat16, q_per_kv=4, target=H200)
    compiled, _ = compile_for_gpu(plan, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((256,), (256, 128))))
    text = compiled.as_text()
    entry = text[text.index("ENTRY") :]
    kernels = [line for line in entry.splitlines() if " fusion(" in line or "custom-call(" in line]
    assert len(kernels) <= 8, kernels
    assert not any(f" {name}(" in text for name in ("sort", "while", "scatter"))
