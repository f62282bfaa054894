"""When an output ends, what its text is, and how it is streamed; on a model that says what it is told."""

import pytest

from jaxinfer import SamplingParams
from tests.jaxinfer.conftest import assert_idle
from tests.jaxinfer.successor import BOS, END, EOS, byte_id, byte_ids

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def greedy(**settings):
    return SamplingParams(temperature=0.0, **settings)


def answer(llm, prompt, **settings):
    [output] = llm.generate(prompt, greedy(**settings))
    [choice] = output.outputs
    assert output.finished
    assert_idle(llm)
    return choice


def ending(choice):
    return choice.text, choice.finish_reason, choice.stop_reason


def test_max_tokens(successor):
    choice = answer(successor, "a", max_tokens=5)
    assert ending(choice) == ("bcdef", "length", None)
    assert choice.token_ids == byte_ids("bcdef")
    assert answer(successor, "a", max_tokens=1).text == "b"
    assert len(answer(successor, "a").token_ids) == 16


@pytest.mark.parametrize(("length", "max_tokens"), [(40, None), (62, 50), (1, None)])
def test_max_model_len(length, max_tokens, successor):
    prompt = (ALPHABET * 3)[:length]
    choice = answer(successor, {"prompt_token_ids": byte_ids(prompt)}, max_tokens=max_tokens)
    assert length + len(choice.token_ids) == successor.engine_config.max_model_len == 64
    assert choice.text == (ALPHABET * 4)[length:64]
    assert choice.finish_reason == "length"


def test_end_ids_of_the_model(successor):
    """Those of generation_config.json too; their own text is left out, their id is not."""
    choice = answer(successor, "6")
    assert ending(choice) == ("789", "stop", None)
    assert choice.token_ids == [*byte_ids("789"), EOS]
    choice = answer(successor, "A")
    assert ending(choice) == ("é€😀B", "stop", None)
    assert choice.token_ids[-1] == END


def test_ignore_eos(successor):
    choice = answer(successor, "8", max_tokens=5, ignore_eos=True)
    assert ending(choice) == ("9abc", "length", None)
    assert choice.token_ids == [*byte_ids("9"), EOS, *byte_ids("abc")]
    assert answer(successor, "8", max_tokens=5, ignore_eos=True, skip_special_tokens=False).text == "9</s>abc"
    assert ending(answer(successor, "8", ignore_eos=True, stop_token_ids=[EOS])) == ("9", "stop", EOS)


def test_stop_token_ids(successor):
    choice = answer(successor, "a", stop_token_ids=[byte_id(ord("z")), byte_id(ord("f")), byte_id(ord("g"))])
    assert ending(choice) == ("bcde", "stop", byte_id(ord("f")))
    assert choice.token_ids == byte_ids("bcdef")


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        ("fgh", "bcde", "fgh"),
        (["xyz", "gh", "fgh"], "bcde", "fgh"),
        (["lmn", "g"], "bcdef", "g"),
        (["fgi", "def"], "bc", "def"),
    ],
)
def test_stop_strings_split_over_tokens(stop, text, found, successor):
    choice = answer(successor, "a", stop=stop)
    assert ending(choice) == (text, "stop", found)
    assert choice.token_ids == byte_ids(text + found)
    assert ending(answer(successor, "a", stop=stop, include_stop_str_in_output=True)) == (text + found, "stop", found)


def test_a_stop_string_that_only_begins_comes_out_in_the_end(successor):
    assert ending(answer(successor, "a", max_tokens=4, stop="efg")) == ("bcde", "length", None)
    assert ending(answer(successor, "a", max_tokens=3, stop="cdX")) == ("bcd", "length", None)


def test_the_prompt_is_not_searched_for_stop_strings(successor):
    assert ending(answer(successor, "xya", max_tokens=3, stop=["xy", "ab", "a"])) == ("bcd", "length", None)


@pytest.mark.parametrize("kind", [{"stop": "d"}, {"stop_token_ids": [byte_id(ord("d"))]}], ids=str)
def test_min_tokens_puts_off_every_stop(kind, successor):
    choice = answer(successor, "a", max_tokens=40, min_tokens=10, **kind)
    assert choice.finish_reason == "stop"
    assert len(choice.token_ids) > 10
    choice = answer(successor, "a", max_tokens=40, min_tokens=2, **kind)
    assert ending(choice) == ("bc", "stop", next(iter(kind.values())) if "stop" in kind else byte_id(ord("d")))


def test_min_tokens_keeps_end_ids_from_being_chosen(successor):
    """After 9 only </s> has a logit; held back, all others are equal and the first id, <s>, is taken."""
    choice = answer(successor, "7", max_tokens=20, min_tokens=5)
    assert choice.token_ids[:5] == [*byte_ids("89"), BOS, *byte_ids("ab")]
    assert choice.finish_reason == "length"
    assert answer(successor, "7", max_tokens=20, min_tokens=2).token_ids == [*byte_ids("89"), EOS]
    assert answer(successor, "7", max_tokens=20, min_tokens=3).token_ids[:3] == [*byte_ids("89"), BOS]


def test_without_detokenizing_there_is_no_text(successor):
    choice = answer(successor, "a", max_tokens=3, detokenize=False)
    assert (choice.text, choice.token_ids) == ("", byte_ids("bcd"))


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        ("a", {"max_tokens": 30}),
        ("A", {}),
        ("X", {}),
        ("6", {}),
        ("a", {"stop": ["mno", "hi"]}),
        ("a", {"stop": "hij", "include_stop_str_in_output": True}),
        ("A", {"stop": "😀"}),
        ("A", {"max_tokens": 7}),
        ("q", {"stop_token_ids": byte_ids("v")}),
    ],
    ids=str,
)
def test_a_stream_joined_is_what_generate_gives(prompt, settings, successor):
    choice = answer(successor, prompt, **settings)
    deltas = list(successor.stream(prompt, greedy(**settings)))
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == choice.token_ids
    assert len(deltas) >= len(choice.token_ids)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (choice.finish_reason, choice.stop_reason)
    assert_idle(successor)


def test_characters_are_streamed_whole(successor):
    texts = [delta.text for delta in successor.stream("A", greedy())]
    assert [text for text in texts if text] == ["é", "€", "😀", "B"]
    assert len(texts) >= 11


def test_bytes_that_are_no_character_end_as_replacement_characters(successor):
    """Two bytes of three, then Y: broken for good; one byte of four when the output ends: broken as well."""
    assert answer(successor, "X").text == "\ufffdY\ufffd"
    texts = [delta.text for delta in successor.stream("X", greedy())]
    assert texts[:2] == ["", ""]


def test_a_stream_holds_back_what_may_become_a_stop_string(successor):
    seen = ""
    for delta in successor.stream("a", greedy(stop="ghijk")):
        seen += delta.text
        assert "g" not in seen
    assert seen == "bcdef"


def test_n_choices_stream_with_their_numbers(successor):
    texts = {0: "", 1: "", 2: ""}
    for delta in successor.stream("a", SamplingParams(n=3, max_tokens=4, seed=1)):
        texts[delta.index] += delta.text
    assert texts == {0: "bcde", 1: "bcde", 2: "bcde"}
