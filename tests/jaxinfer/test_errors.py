"""What cannot be served is refused before any compute, and says what was wrong, the limit and what to do."""

import re

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ModelConfig, RopeConfig
from tests import tiny
from tests.jaxinfer.conftest import TINY, assert_idle
from tests.jaxinfer.prompts import VOCAB, ids, tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def llm(models):
    return models("llama")


@pytest.fixture
def no_compute(llm, monkeypatch):
    """Fails the test if a step is run."""

    def run(batch):
        pytest.fail("a step was run")

    monkeypatch.setattr(llm.engine._runner, "run", run)


BAD_REQUESTS = {
    "empty prompt": ({"prompt_token_ids": []}, {}, r"request \d+ has an empty prompt; give it at least one token"),
    "too long": (
        ids(128),
        {},
        r"the prompt has 128 tokens, and max_model_len is 128, output included; shorten it or raise max_model_len",
    ),
    "id = vocab": (
        {"prompt_token_ids": [1, VOCAB, 3]},
        {},
        r"token ids \[251\] are outside the vocabulary of 251",
    ),
    "negative id": ({"prompt_token_ids": [-1]}, {}, r"token ids \[-1\] are outside the vocabulary of 251"),
    "stop id = vocab": (ids(3), {"stop_token_ids": [VOCAB]}, r"stop_token_ids \[251\] are outside the vocabulary"),
    "negative stop id": (ids(3), {"stop_token_ids": [-1]}, r"stop_token_ids \[-1\] are outside the vocabulary of 251"),
    "too many to hold back": (
        ids(3),
        {"stop_token_ids": list(range(10, 50)), "min_tokens": 1},
        r"min_tokens holds back 41 end and stop ids, at most 32 are possible; pass fewer stop_token_ids",
    ),
    "not a prompt": (42, {}, r"a prompt is text, \{\"prompt\": …\} or \{\"prompt_token_ids\": \[…\]\}; got 42"),
    "images": ({"prompt": "a", "multi_modal_data": {}}, {}, r"nothing else; it has \['multi_modal_data'\]"),
    "a dict without a prompt": ({"text": "hi"}, {}, r"a prompt may hold .*; it has \['text'\]"),
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
@pytest.mark.usefixtures("no_compute")
def test_one_bad_request_refuses_the_call_before_any_compute(bad, llm):
    prompt, settings, message = BAD_REQUESTS[bad]
    params = SamplingParams(max_tokens=4, **settings)
    with pytest.raises(ValueError, match=message):
        llm.generate([ids(5), prompt, ids(6)], [GREEDY, params, GREEDY])
    assert_idle(llm)
    if isinstance(prompt, dict):
        with pytest.raises(ValueError, match=message):
            llm.stream(prompt, params)
    assert_idle(llm)


def test_after_a_refusal_the_llm_is_as_before(llm):
    expected = tokens(llm.generate([ids(5), ids(9)], GREEDY))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([ids(5), {"prompt_token_ids": [999]}], GREEDY)
    assert tokens(llm.generate([ids(5), ids(9)], GREEDY)) == expected


def test_the_longest_prompt_is_served(llm):
    [output] = llm.generate(ids(127), SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_a_request_that_the_pool_cannot_hold_is_refused_and_one_that_fits_is_served(models):
    llm = models("llama", num_pages=9)
    message = (
        r"may take 73 tokens, 10 pages of 8, and the cache has 9; lower max_tokens or max_model_len, "
        r"shorten the prompt, or raise num_pages or memory_fraction"
    )
    with pytest.raises(ValueError, match=message):
        llm.generate([ids(5), ids(33)], SamplingParams(max_tokens=40))
    assert_idle(llm)
    with pytest.raises(ValueError, match="may take 128 tokens, 16 pages of 8, and the cache has 9"):
        llm.generate(ids(33), SamplingParams(max_tokens=None))
    [output] = llm.generate(ids(33), SamplingParams(max_tokens=39, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 39


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n is 0; it must be between 1 and 1024"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be 0 (greedy) or a positive finite number"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0 (greedy)"),
        ({"temperature": float("inf")}, "temperature is inf; it must be 0 (greedy)"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2; it must be at least 1, or 0 or -1 to keep all tokens"),
        ({"min_p": 2.0}, "min_p is 2.0; it must be between 0 and 1"),
        ({"seed": -1}, "seed is -1; it must be between 0 and 2**32 - 1, or None"),
        ({"seed": 2**32}, "seed is 4294967296; it must be between 0 and 2**32 - 1"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1, or None for no limit"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0"),
        ({"min_tokens": 20}, "min_tokens is 20; it must be at most max_tokens, which is 16"),
        ({"logprobs": 21}, "logprobs is 21; it must be 0 to 20, -1 for all, or None"),
        ({"logprobs": -2}, "logprobs is -2; it must be 0 to 20"),
        ({"prompt_logprobs": 100}, "prompt_logprobs is 100; it must be 0 to 20"),
        ({"n": None}, "n is None; it must be an integer"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0; it must be an integer, or None"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
        ({"skip_special_tokens": 3}, "skip_special_tokens is 3; it must be True or False"),
        ({"stop_token_ids": iter([3])}, "it must be a list of token ids"),
        ({"stop": ["a", ""]}, "stop is ['a', '']; it must be one or more non-empty strings"),
        ({"stop": "a", "detokenize": False}, "stop is 'a'; it must be empty when detokenize is False"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),  # the same in every process
)
def test_bad_sampling_parameters(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**settings)


def load(folder, **settings):
    return LLM(str(folder), **{**TINY, **settings})


def test_no_such_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such model: '.*nowhere' is neither a file or folder here"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("model", [None, 5, b"x", ""])
def test_what_names_no_model(model):
    with pytest.raises(ValueError, match=re.escape(f"the model is {model!r}; give the path of a checkpoint, or a Hub")):
        LLM(model)


def test_unsupported_architecture(tmp_path):
    tiny.write_config({**tiny.CASES["llama"], "model_type": "mamba"}, tmp_path)
    message = r"architecture 'mamba' is not supported; supported model types: .*llama, .*mistral, .*qwen2, .*qwen3"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_unknown_rope_type(tmp_path):
    tiny.write_config({**tiny.CASES["llama"], "rope_parameters": {"rope_type": "spiral"}}, tmp_path)
    with pytest.raises(ValueError, match=r"rope_type.*'spiral'.*default, linear, llama3, yarn"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "max_model_len is 257, and the model was made for 256 tokens at most"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be at least 1"),
        ({"max_num_seqs": 17}, "max_num_batched_tokens is 16, below max_num_seqs 17: .* raise the first or lower the"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"page_size": 12}, "page_size is 12; it must be a power of two"),
        ({"num_pages": 0}, "num_pages is 0; it must be at least 1, or None to fill the memory left"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5; it must be above 0 and at most 1"),
        ({"steps_in_flight": 0}, "steps_in_flight is 0; it must be at least 1"),
        ({"max_model_len": "64"}, "max_model_len is '64'; it must be an integer"),
        ({"max_num_seqs": 4.0}, "max_num_seqs is 4.0; it must be an integer"),
        ({"page_size": "8"}, "page_size is '8'; it must be a power of two"),
        ({"num_pages": 9.5}, "num_pages is 9.5; it must be an integer, or None to fill the memory left"),
        ({"memory_fraction": None}, "memory_fraction is None; it must be above 0 and at most 1"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2'; it must be an integer"),
        ({"mesh": 5}, "mesh is 5; it must be a jax.sharding.Mesh, or None"),
        ({"max_loras": "2"}, "max_loras is '2'; it must be an integer"),
        ({"seed": "x"}, "seed is 'x'; it must be an integer"),
        ({"warm_up": "no"}, "warm_up is 'no'; it must be True or False"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of auto, float32, bfloat16, float16"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not fit .* sizes that fit: 1, 2, 4, 8"),
    ],
    ids=str,
)
def test_bad_settings(settings, message, models):
    with pytest.raises(ValueError, match=message):
        load(models.checkpoint("llama"), **settings)


def test_a_cache_too_small_for_one_sequence_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr("jaxinfer.memory.free_bytes", lambda mesh, temporaries: 3 * 2**20)
    config = ModelConfig("llama", 97, 32, 2, 4, 4, 64, 16, 4096, RopeConfig())
    message = (
        "the cache of one sequence of max_model_len 4096 takes 16 MiB a device, and 3 MiB are left; "
        "lower max_model_len, or raise memory_fraction on a GPU"
    )
    with pytest.raises(ValueError, match=message):
        LLM(config, **{**TINY, "max_model_len": 4096})
    assert LLM(config, **{**TINY, "max_model_len": 700}).engine.scheduler.pools[0].num_pages * 8 >= 700


def test_stop_strings_without_a_tokenizer(models):
    llm = models("llama")
    with pytest.raises(ValueError, match="stop strings need a tokenizer, and this LLM has none; pass stop_token_ids"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(stop="x"))


@pytest.mark.parametrize("ids", [[1.7], 5, ["a"], [True], b"ab", {5: 6}], ids=str)
def test_prompt_ids_that_are_no_integers(models, ids):
    with pytest.raises(ValueError, match="prompt_token_ids must be a list of integers"):
        models("llama").generate({"prompt_token_ids": ids})
