"""Write the table of docs/models.md: every family's tiny checkpoint against transformers, on one device and on two.

`python scripts/model_table.py [FAMILY …]`, from anywhere; on a CPU. Rows of other families stay as they are. The
goldens in tests/goldens hold what transformers computed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Compiling is most of the work; what is computed does not depend on how well it is compiled.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from convert.families import FAMILIES, model_config  # noqa: E402
from jaxinfer import SamplingParams  # noqa: E402
from scripts.check_families import GOLDENS, difference, load  # noqa: E402
from tests import tiny, tiny_families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: scripts/model_table.py -->\n", "<!-- end of table -->\n"
HEAD = "| `model_type` | checkpoints | one device | two devices | int8 weights, mean | experts |\n"
RULE = "| --- | --- | --- | --- | --- | --- |\n"


def measure(case: str) -> tuple[float, float, float]:
    """Largest difference from transformers on one device and on two, of a log-probability, or of an element of an
    encoder's vector; mean in int8. Raises ValueError if a greedy token differs."""
    found = []
    for devices in (1, 2):
        largest, same = difference(case, tensor_parallel_size=devices)
        if not same:
            raise ValueError(f"{case} on {devices} devices: other greedy tokens")
        found.append(largest)
    in_int8 = mean_in_int8(case)
    jax.clear_caches()  # a process may hold so many programs only
    return found[0], found[1], in_int8


def mean_in_int8(case: str) -> float:
    encoder = case in tiny_families.ENCODERS
    llm = load(case, quantization="int8", max_model_len=64 if encoder else 128)
    with np.load(GOLDENS / f"{'hidden_' if encoder else ''}{case}.npz") as golden:
        prompt = {"prompt_token_ids": golden["prompt_ids"].tolist()}
        expected = golden["mean" if encoder else "logprobs"]
    if encoder:
        [output] = llm.embed(prompt, pooling="mean")
        return float(np.abs(output.embedding - expected).mean())
    [scored] = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1))
    return float(np.abs(scored.prompt_logprobs - expected).mean())


def row(family: str) -> str:
    if family in tiny_families.SAME_AS:
        return f"| `{family}` | as `{tiny_families.SAME_AS[family]}` | | | | |\n"
    cases = [case for case, config in tiny.EVERY_CASE.items() if config["model_type"] == family]
    measured = [measure(case) for case in cases]
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
