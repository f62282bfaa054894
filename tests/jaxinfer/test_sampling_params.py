"""Every bound of every sampling parameter, and what is said past it."""

from __future__ import annotations

import math

import pytest

from jaxinfer import SamplingParams
from jaxinfer.sampling_params import MAX_CHOICES


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n is 0; it must be between 1 and 1024"),
        ({"n": MAX_CHOICES + 1}, "n is 1025; it must be between 1 and 1024"),
        ({"temperature": -0.1}, r"temperature is -0.1; it must be 0 \(greedy\) or a positive finite number"),
        ({"temperature": math.inf}, "temperature is inf; it must be 0"),
        ({"temperature": math.nan}, "temperature is nan; it must be 0"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -2}, "top_k is -2; it must be at least 1, or 0 or -1 to keep all tokens"),
        ({"min_p": -0.5}, "min_p is -0.5; it must be between 0 and 1"),
        ({"min_p": 1.1}, "min_p is 1.1; it must be between 0 and 1"),
        ({"seed": -1}, r"seed is -1; it must be between 0 and 2\*\*32 - 1, or None"),
        ({"seed": 2**32}, "seed is 4294967296; it must be between"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1, or None for no limit"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0"),
        ({"min_tokens": 17}, "min_tokens is 17; it must be at most max_tokens, which is 16"),
        ({"logprobs": 21}, "logprobs is 21; it must be 0 to 20, -1 for all, or None"),
        ({"logprobs": -2}, "logprobs is -2; it must be 0 to 20, -1 for all, or None"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be 0 to 20, -1 for all, or None"),
        ({"stop": ""}, "stop is ''; it must be one or more non-empty strings"),
        ({"stop": ["a", ""]}, r"stop is \['a', ''\]; it must be one or more non-empty strings"),
        ({"stop": [3]}, r"stop is \[3\]; it must be one or more non-empty strings"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"stop": 5}, "stop is 5; it must be one or more non-empty strings"),
        ({"stop_token_ids": "abc"}, "stop_token_ids is 'abc'; it must be a list of token ids"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be an integer"),
        ({"n": 1.5}, "n is 1.5; it must be an integer"),
        ({"logprobs": True}, "logprobs is True; it must be an integer"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop_token_ids": [1.5]}, r"stop_token_ids is \[1.5\]; it must be a list of token ids"),
        ({"stop": "a", "detokenize": False}, "stop is 'a'; it must be empty when detokenize is False"),
    ],
)
def test_bad_values(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"n": MAX_CHOICES},
        {"temperature": 0},
        {"top_p": 1e-6},
        {"top_k": -1},
        {"min_p": 1.0},
        {"seed": 2**32 - 1},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"logprobs": 0, "prompt_logprobs": -1},
        {"logprobs": 20, "prompt_logprobs": 20},
    ],
)
def test_values_at_the_bounds(params):
    made = SamplingParams(**params)
    assert {name: getattr(made, name) for name in params} == params


def test_stop_strings():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


def test_defaults_are_those_that_users_know():
    made = SamplingParams()
    assert (made.n, made.temperature, made.top_p, made.top_k, made.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (made.max_tokens, made.min_tokens, made.seed, made.logprobs, made.ignore_eos) == (16, 0, None, None, False)
