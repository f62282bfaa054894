"""Write the table of docs/models.md: every family's tiny checkpoint against transformers, on one device and on two.

`python scripts/model_table.py [FAMILY …]`, from anywhere; on a CPU. Rows of other families stay as they are. The
goldens in tests/goldens hold what transformers computed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Compiling is most of the work; what is computed does not depend on how well it is compiled.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from convert.families import FAMILIES, model_config  # noqa: E402
from jaxinfer import LLM, SamplingParams  # noqa: E402
from tests import tiny, tiny_families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: scripts/model_table.py -->\n", "<!-- end of table -->\n"
HEAD = "| `model_type` | checkpoints | one device | two devices | int8 weights, mean | experts |\n"
RULE = "| --- | --- | --- | --- | --- | --- |\n"
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 88,
    "page_size": 8,
    "warm_up": False,
    "progress": False,
}


def logprobs(folder: Path, prompt: list[int], **settings: Any) -> np.ndarray:
    llm = LLM(str(folder), **SETTINGS, **settings)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    [output] = llm.generate({"prompt_token_ids": prompt}, params)
    return np.asarray(output.prompt_logprobs)


def vector(folder: Path, prompt: list[int], **settings: Any) -> np.ndarray:
    [output] = LLM(str(folder), **{**SETTINGS, "max_model_len": 64}, **settings).embed(
        {"prompt_token_ids": prompt}, pooling="mean"
    )
    return output.embedding


def measure(case: str, folder: Path) -> tuple[float, float, float]:
    """Largest difference from transformers on one device and on two, of a log-probability, or of an element of an
    encoder's vector; mean in int8."""
    compute, name, key = logprobs, case, "logprobs"
    if case in tiny_families.ENCODERS:
        compute, name, key = vector, f"hidden_{case}", "mean"
    with np.load(ROOT / "tests" / "goldens" / f"{name}.npz") as golden:
        prompt, expected = golden["prompt_ids"].tolist(), golden[key]
    tiny.write_checkpoint(case, folder)
    one, two = (np.abs(compute(folder, prompt, tensor_parallel_size=size) - expected).max() for size in (1, 2))
    return one, two, np.abs(compute(folder, prompt, quantization="int8") - expected).mean()


def row(family: str) -> str:
    if family in tiny_families.SAME_AS:
        return f"| `{family}` | as `{tiny_families.SAME_AS[family]}` | | | | |\n"
    cases = [case for case, config in tiny.EVERY_CASE.items() if config["model_type"] == family]
    with tempfile.TemporaryDirectory() as folder:
        measured = [measure(case, Path(folder) / case) for case in cases]
    one, two, int8 = (max(values) for values in zip(*measured, strict=True))
    experts = "yes" if any(model_config(tiny.EVERY_CASE[case]).num_experts for case in cases) else ""
    return f"| `{family}` | {len(cases)} | {one:.1e} | {two:.1e} | {int8:.3f} | {experts} |\n"


def main() -> None:
    before, rest = PAGE.read_text().split(START)
    table, after = rest.split(END)
    rows = {
        line.split("`")[1]: line for line in table.splitlines(keepends=True) if line.startswith("| `") and line != HEAD
    }
    for family in sys.argv[1:] or sorted(FAMILIES):
        rows[family] = row(family)
        print(rows[family], end="", flush=True)
    listed = "".join(rows[family] for family in sorted(FAMILIES) if family in rows)
    PAGE.write_text(before + START + HEAD + RULE + listed + END + after)


if __name__ == "__main__":
    main()
