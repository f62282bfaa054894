"""The programs that GPUs run, without branches and with bucketed block tables, give what the CPU's give."""

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, startup
from jaxinfer.engine import step
from pallas_kernels.target import Target
from tests.jaxinfer.conftest import TINY
from tests.jaxinfer.prompts import assert_same_listed, ids, tokens

PROMPTS = [ids(length) for length in (3, 40, 70)]
MIXED = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def gpu_like(models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "data_dependent", lambda platform: False)
        patch.setattr(step, "target_of", lambda mesh: Target("gpu"))
        return LLM(str(models.checkpoint("qwen2_windows")), **TINY)


@pytest.mark.parametrize("params", [MIXED[0], MIXED], ids=["greedy", "mixed"])
def test_equals_the_cpu_programs(models, gpu_like, params):
    got, want = gpu_like.generate(PROMPTS, params), models("qwen2_windows").generate(PROMPTS, params)
    assert tokens(got) == tokens(want)
    if params is MIXED:
        assert_same_listed(got[1].outputs[0].logprobs, want[1].outputs[0].logprobs)
        assert_same_listed(got[2].prompt_logprobs[1:], want[2].prompt_logprobs[1:])


def test_greedy_batches_have_programs_of_their_own(gpu_like):
    gpu_like.generate(PROMPTS, MIXED)
    gpu_like.generate(PROMPTS, MIXED[0])
    gpu_like.generate(PROMPTS[0], MIXED[0])  # 27 tokens at the end, 4 pages of 8
    kinds = {shape.sampling for shape in gpu_like.engine._runner._executables}
    widths = {shape.width for shape in gpu_like.engine._runner._executables if shape.decode}
    assert kinds == {"greedy", "full"}
    assert widths == {8, 16}


def test_parity(gpu_like, golden):
    reference = golden("qwen2_windows")
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    [output] = gpu_like.generate([{"prompt_token_ids": reference["prompt_ids"].tolist()}], scored)
    np.testing.assert_allclose(output.prompt_logprobs, reference["logprobs"], rtol=0, atol=1e-4)
