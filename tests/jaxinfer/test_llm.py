"""The Python API: prompts in all forms, chats, streams that are left early, and interrupts."""

import gc
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import ModelConfig, RopeConfig
from tests.jaxinfer.conftest import TINY, assert_idle
from tests.jaxinfer.prompts import ids, tokens
from tests.jaxinfer.successor import BOS, byte_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=40)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_prompts_come_as_text_or_ids_alone_or_in_lists(successor):
    assert texts(successor.generate("a", GREEDY)) == ["bcdefghi"]
    assert texts(successor.generate({"prompt": "b"}, GREEDY)) == ["cdefghij"]
    outputs = successor.generate(["c", {"prompt": "6"}, {"prompt_token_ids": byte_ids("xy")}], GREEDY)
    assert texts(outputs) == ["defghijk", "789", "zabcdefg"]
    assert [output.prompt for output in outputs] == ["c", "6", None]
    assert [output.prompt_token_ids for output in outputs] == [
        [BOS, *byte_ids("c")],
        [BOS, *byte_ids("6")],
        byte_ids("xy"),
    ]
    assert successor.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_params(successor):
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in (3, 1, 5, 2, 4, 6)]
    assert texts(successor.generate(["a"] * 6, params)) == ["bcd", "b", "bcdef", "bc", "bcde", "bcdefg"]
    with pytest.raises(ValueError, match="2 sampling params for 3 prompts; pass one for all, or one per prompt"):
        successor.generate(["a"] * 3, params[:2])
    assert len(successor.generate("a")[0].outputs[0].token_ids) == 16


def test_outputs_have_ids_of_their_own_and_times_in_order(successor):
    before = time.monotonic()
    outputs = successor.generate(["a", "b", "c"], GREEDY)
    assert len({output.request_id for output in outputs}) == 3
    for output in outputs:
        metrics = output.metrics
        assert before <= metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time <= time.monotonic()
        assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time
        assert (metrics.num_preemptions, output.finished) == (0, True)


def test_log_probabilities_carry_the_text_of_their_tokens(successor):
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=0)
    [output] = successor.generate("a", params)
    assert [entries[t].decoded_token for entries, t in zip(output.outputs[0].logprobs, byte_ids("bc"))] == ["b", "c"]
    assert output.prompt_logprobs[1][byte_ids("a")[0]].decoded_token == "a"


def test_a_chat_goes_through_the_template_and_gets_one_bos(successor):
    messages = [{"role": "user", "content": "hi"}]
    [output] = successor.chat(messages, GREEDY)
    assert output.prompt_token_ids == [BOS, *byte_ids("hi:")]
    assert output.outputs[0].text == "klmnopqr"
    outputs = successor.chat([messages, [{"role": "user", "content": "5"}]], GREEDY, add_generation_prompt=False)
    assert texts(outputs) == ["jklmnopq", "6789"]
    assert "".join(delta.text for delta in successor.stream_chat(messages, GREEDY)) == "klmnopqr"
    with pytest.raises(ValueError, match="no messages"):
        successor.chat([[]], GREEDY)


@pytest.mark.parametrize("leave", ["close", "drop", "break"])
def test_a_stream_left_early_frees_its_pages(leave, successor):
    stream = successor.stream("a", SamplingParams(temperature=0.0, max_tokens=40, n=3))
    assert next(stream).text == "b"
    assert successor.engine.has_unfinished
    if leave == "close":
        stream.close()
    elif leave == "drop":
        del stream
        gc.collect()
    else:
        for _ in stream:
            break
        del stream
        gc.collect()
    assert_idle(successor)
    assert texts(successor.generate(["a", "6"], GREEDY)) == ["bcdefghi", "789"]


def test_a_stream_that_is_not_read_takes_nothing(successor):
    stream = successor.stream("a", GREEDY)
    assert_idle(successor)
    assert "".join(delta.text for delta in stream) == "bcdefghi"


def test_streams_interleave_with_each_other_and_with_generate(successor):
    first, second = successor.stream("a", LONG), successor.stream("m", SamplingParams(temperature=0.0, max_tokens=9))
    one, other = next(first).text, next(second).text
    assert texts(successor.generate(["0", "t"], GREEDY)) == ["12345678", "uvwxyzab"]
    other += next(second).text
    one += next(first).text
    other += "".join(delta.text for delta in second)
    one += "".join(delta.text for delta in first)
    assert one == ("abcdefghijklmnopqrstuvwxyz" * 2)[1:41]
    assert other == "nopqrstuv"
    assert_idle(successor)


@pytest.fixture
def sigint():
    """Ctrl-C raises KeyboardInterrupt, as in a program of its own; test runners may ignore it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupting(call, after, first):
    """`call`, with Ctrl-C pressed in its `after`-th run: at the start, or when it has done its work."""
    runs = []

    def wrapped(*args):
        runs.append(args)
        if first and len(runs) == after:
            signal.raise_signal(signal.SIGINT)
        result = call(*args)
        if not first and len(runs) == after:
            signal.raise_signal(signal.SIGINT)
        return result

    return wrapped


@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("where", ["schedule", "execute", "postprocess", "add", "between"])
@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.usefixtures("sigint")
def test_an_interrupt_frees_everything_and_the_llm_and_other_streams_go_on(where, after, first, successor, monkeypatch):
    """Six requests for four slots, one of which a stream holds, interrupted wherever it hurts: the step that holds
    the cache is not given up, and no request is forgotten."""
    engine = successor.engine
    stream = successor.stream("0a", LONG)
    heard = next(stream).text
    with monkeypatch.context() as patch:
        if where == "execute":
            executables = engine._runner._executables
            patch.setattr(
                engine._runner, "_executables", {s: interrupting(e, after, first) for s, e in executables.items()}
            )
        else:
            target, name = {
                "schedule": (engine.scheduler, "schedule"),
                "postprocess": (engine, "_postprocess"),
                "add": (engine.scheduler, "add"),
                "between": (engine, "step"),
            }[where]
            patch.setattr(target, name, interrupting(getattr(target, name), after, first))
        with pytest.raises(KeyboardInterrupt):
            successor.generate(list("abcdef"), LONG)
    assert len(engine._outputs) == len(engine.scheduler.running) + len(engine.scheduler.waiting) == 1
    assert texts(successor.generate(list("amq0"), GREEDY)) == ["bcdefghi", "nopqrstu", "rstuvwxy", "12345678"]
    assert heard + "".join(delta.text for delta in stream) == ("abcdefghijklmnopqrstuvwxyz" * 2)[1:41]
    assert_idle(successor)


def test_random_weights_need_no_checkpoint_and_follow_the_seed():
    config = ModelConfig("llama", 97, 32, 1, 4, 2, 8, 16, 64, RopeConfig())

    def run(seed):
        llm = LLM(config, **{**TINY, "max_model_len": None}, seed=seed)
        assert llm.engine_config.max_model_len == 64
        prompt = {"prompt_token_ids": [3, 5, 7]}
        return tokens(llm.generate(prompt, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))

    assert run(0) == run(0) != run(1)


def test_without_a_tokenizer_text_is_refused(models):
    llm = models("llama")
    for call in (lambda: llm.generate("hi"), lambda: llm.chat([{"role": "user", "content": "hi"}])):
        with pytest.raises(ValueError, match=r"has no tokenizer .*; pass \{\"prompt_token_ids\": \[…\]\}"):
            call()
    assert len(llm.generate(ids(3), GREEDY)[0].outputs[0].token_ids) == 8
    assert llm.generate(ids(3), GREEDY)[0].outputs[0].text == ""


def test_threads_share_the_engine(models):
    """Each gets what it would get alone, and nobody waits for another's steps."""
    llm = models("llama")
    prompts = [ids(length) for length in (3, 9, 20, 33)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    want = [tokens(llm.generate(prompt, params)) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            got = [pool.submit(llm.generate, prompt, params) for prompt in prompts]
            assert [tokens(future.result()) for future in got] == want
            streams = [pool.submit(lambda prompt: list(llm.stream(prompt, params)), prompt) for prompt in prompts]
            told = [[i for delta in future.result() for i in delta.token_ids] for future in streams]
            assert told == [choices[0][0] for choices in want]
    assert_idle(llm)


def test_the_keywords_vllm_users_know(successor):
    params = SamplingParams(max_tokens=1, temperature=0.0)
    [output] = successor.generate(prompts="a", sampling_params=params, use_tqdm=False)
    assert output.outputs[0].token_ids == successor.generate("a", params)[0].outputs[0].token_ids
    assert successor.get_tokenizer() is successor.tokenizer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(5), "prompts is 5, which is no list"),
        (lambda llm: llm.generate(None), "prompts is None, which is no list"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "sampling_params is .* which is no list"),
        (lambda llm: llm.generate("a", [3]), "sampling_params holds 3; it must be a SamplingParams"),
        (lambda llm: llm.generate("bad \udcff"), "the prompt is not valid Unicode text"),
        (lambda llm: llm.chat([]), "the chat has no messages"),
        (lambda llm: llm.generate(b"ab"), "prompts is b'ab', which is no list"),
        (lambda llm: llm.embed("a", normalize="no"), "normalize is 'no'; it must be True or False"),
        (lambda llm: llm.embed("a", truncate=None), "truncate is None; it must be True or False"),
        (lambda llm: llm.stream("a", 3), "sampling_params is 3, which is no list"),
    ],
)
def test_what_is_no_prompt(successor, call, message):
    with pytest.raises(ValueError, match=message):
        call(successor)
