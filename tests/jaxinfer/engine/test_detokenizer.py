"""Deltas joined are what decoding everything at once gives, whatever the tokens; stop strings cut where they should."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxinfer import SamplingParams
from jaxinfer.engine.detokenizer import Detokenizer

ALPHABET = "aé你😀 \n\u0301"
FFFD = "\N{REPLACEMENT CHARACTER}"


class Decoder:
    """The duck type over a backend tokenizer, with special tokens skipped as it skips them."""

    def __init__(self, backend):
        self.backend = backend
        self.special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.decoded_ids = 0

    def decode(self, token_ids, skip_special_tokens=True):
        self.decoded_ids += len(token_ids)
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def renders(self, token_id, skip_special_tokens=True):
        skipped = skip_special_tokens and token_id in self.special
        return not skipped and self.backend.id_to_token(token_id) is not None


def _byte_chars():
    """The printable stand-ins of the 256 bytes, in the order of GPT-2's table."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in keep}
    return table | {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in table)}


BYTE_CHARS = _byte_chars()


def _byte_level():
    """First the 256 bytes, then longer byte strings that start and end within characters, then added tokens."""
    pieces = [bytes([b]) for b in range(256)]
    text = " 😀你é".encode()
    pieces += [text[i:j] for i in range(len(text)) for j in range(i + 2, len(text) + 1)]
    pieces += [b"ab", b" the", "\u0301".encode(), FFFD.encode()]
    vocab = {"".join(BYTE_CHARS[b] for b in piece): i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Decoder(backend)


def _sentencepiece():
    """`▁` pieces, byte pieces, and the decoder that drops one leading space."""
    tokens = ["<unk>", "<s>", "▁", "▁a", "a", "▁▁", "b", "\n", "▁b", *(f"<0x{b:02X}>" for b in range(256)), ""]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return Decoder(backend)


BYTE_LEVEL, SENTENCEPIECE = _byte_level(), _sentencepiece()
UNKNOWN_ID = 100_000
byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.backend.get_vocab_size() - 1) | st.just(UNKNOWN_ID), max_size=60)


def bytes_of(text, split):
    """Ids of the byte tokenizer for `text`, its bytes joined into pieces wherever `split` and the vocabulary allow."""
    data, ids, i = "".join(BYTE_CHARS[b] for b in text.encode()), [], 0
    while i < len(data):
        size = next(n for n in range(min(next(split), len(data) - i), 0, -1) if data[i : i + n] in VOCAB)
        ids.append(VOCAB[data[i : i + size]])
        i += size
    return ids


VOCAB = BYTE_LEVEL.backend.get_vocab()


def run(decoder, prompt, ids, **params):
    detokenizer = Detokenizer(decoder, prompt, SamplingParams(max_tokens=None, **params))
    return [detokenizer.push(i) for i in ids] + [detokenizer.finish()], detokenizer


def in_context(decoder, prompt, ids, skip=True):
    before = decoder.decode(prompt, skip)
    return decoder.decode([*prompt, *ids], skip)[len(before) :]


@st.composite
def split_text(draw, text=None):
    text = draw(st.text(ALPHABET, max_size=40) | st.text(max_size=40)) if text is None else text
    cuts = draw(st.lists(st.integers(1, 12), min_size=len(text.encode()) + 1, max_size=len(text.encode()) + 1))
    return text, bytes_of(text, iter(cuts))


@given(split_text(), split_text())
def test_any_text_split_anywhere_comes_out_whole(prompt, output):
    deltas, detokenizer = run(BYTE_LEVEL, prompt[1], output[1])
    assert "".join(deltas) == detokenizer.text == output[0]
    for delta in deltas:
        assert FFFD not in delta or FFFD in output[0]


@given(byte_level_ids, byte_level_ids, st.booleans())
def test_any_bytes_equal_decoding_them_together(prompt, ids, skip):
    prompt = [*prompt, VOCAB["a"]]
    deltas, _ = run(BYTE_LEVEL, prompt, ids, skip_special_tokens=skip)
    assert "".join(deltas) == in_context(BYTE_LEVEL, prompt, ids, skip)


@given(
    st.lists(st.integers(1, 8), max_size=4), st.lists(st.integers(1, 8) | st.text(ALPHABET, max_size=5), max_size=20)
)
def test_sentencepiece_equals_decoding_together(prompt, parts):
    ids = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [9 + b for b in part.encode()]
    deltas, _ = run(SENTENCEPIECE, prompt, ids)
    assert "".join(deltas) == in_context(SENTENCEPIECE, prompt, ids)
    assert FFFD not in "".join(deltas)


def test_leading_space_is_kept_after_a_prompt_and_dropped_without():
    assert run(SENTENCEPIECE, [3], [3, 2, 3])[0] == [" a", " ", " a", ""]
    assert run(SENTENCEPIECE, [3, *[1] * 30], [3, UNKNOWN_ID, 3])[0] == [" a", "", " a", ""]
    assert run(SENTENCEPIECE, [1], [3, 3])[0] == ["a", " a", ""]
    assert run(SENTENCEPIECE, [], [2, 3, 3])[0] == ["", " a", " a", ""]
    empty = SENTENCEPIECE.backend.token_to_id("")
    assert run(SENTENCEPIECE, [3], [3, empty, 3])[0] == [" a", "", " a", ""]


def test_a_character_appears_with_its_last_byte():
    deltas, _ = run(BYTE_LEVEL, [97], bytes_of("😀é", iter([1] * 10)))
    assert deltas == ["", "", "", "😀", "", "é", ""]
    deltas, _ = run(SENTENCEPIECE, [4], [9 + b for b in "你好".encode()])
    assert deltas == ["", "", "你", "", "", "好", ""]


def test_a_character_begun_by_the_prompt_is_completed_and_a_broken_one_in_it_is_not_repeated():
    start, *rest = bytes_of("你x", iter([1] * 4))
    assert run(BYTE_LEVEL, [VOCAB["a"], start], rest)[0] == ["", "你", "x", ""]
    byte_ids = [9 + b for b in "你好".encode()]
    assert "".join(run(SENTENCEPIECE, [4, *byte_ids[:2]], byte_ids[2:])[0]) == "你好"
    assert "".join(run(BYTE_LEVEL, bytes_of("a" + FFFD, iter([1] * 9)), [VOCAB["a"]])[0]) == "a"


def test_sentencepiece_prompt_that_ends_in_bytes_longer_than_the_window():
    prompt = [4, *(9 + b for b in ("你" * 30).encode())]
    assert "".join(run(SENTENCEPIECE, prompt, [9 + b for b in "好的".encode()])[0]) == "好的"


def test_incomplete_end_becomes_replacement_only_at_the_end():
    deltas, detokenizer = run(BYTE_LEVEL, [97], bytes_of("a😀", iter([1] * 9))[:-1])
    assert deltas == ["a", "", "", "", FFFD]
    assert detokenizer.finish() == ""
    assert detokenizer.text == "a" + FFFD


def test_tokens_that_each_end_one_character_and_begin_the_next_still_stream():
    """No token border is ever a character border, for far longer than the window."""
    data = "😀".encode() * 200
    border = "".join(BYTE_CHARS[b] for b in data[3:5])
    backend = Backend(models.BPE(vocab=VOCAB | {border: len(VOCAB)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    decoder = Decoder(backend)
    ids = [*data[:3], *([len(VOCAB), data[1], data[2]] * 199), data[3]]
    ids = [i if i > 255 else VOCAB[BYTE_CHARS[i]] for i in ids]
    deltas, _ = run(decoder, [VOCAB["a"]], ids)
    assert "".join(deltas) == "😀" * 200
    assert deltas[3::3] == ["😀"] * 200
    assert decoder.decoded_ids < 40 * len(ids)


def test_special_tokens_are_skipped_or_shown_and_added_tokens_are_shown():
    end, tool = (BYTE_LEVEL.backend.token_to_id(t) for t in ("<end>", "<tool>"))
    ids = [VOCAB["a"], end, tool, end]
    assert run(BYTE_LEVEL, [VOCAB["a"]], ids)[0] == ["a", "", "<tool>", "", ""]
    assert run(BYTE_LEVEL, [VOCAB["a"]], ids[1:], skip_special_tokens=False)[0] == ["<end>", "<tool>", "<end>", ""]


def expected_stop(text, stops, include):
    """First prefix of `text` that ends with a stop string, cut; None where there is none."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.text("ab你", max_size=30).flatmap(lambda text: split_text(text)),
    st.lists(st.text("ab你", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=300)
def test_stop_strings_cut_whatever_the_tokens(output, stops, include):
    text, ids = output
    expected, stop = expected_stop(text, stops, include)
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams(stop=stops, include_stop_str_in_output=include))
    streamed = ""
    for token_id in ids:
        streamed += detokenizer.push(token_id)
        assert expected.startswith(streamed)
        if detokenizer.stop_reason is None:  # nothing more is held than what may begin a stop string
            seen = BYTE_LEVEL.decode(ids[: detokenizer.num_tokens]).rstrip(FFFD)
            held = seen[len(streamed) :]
            assert not held or any(s.startswith(held) for s in stops)
    streamed += detokenizer.finish()
    assert (streamed, detokenizer.text, detokenizer.stop_reason) == (expected, expected, stop)
    at_once = Detokenizer(BYTE_LEVEL, [], SamplingParams(stop=stops, include_stop_str_in_output=include))
    assert at_once.extend(ids) + at_once.finish() == expected
    assert at_once.num_tokens == detokenizer.num_tokens


def test_streamed_text_waits_for_what_may_begin_a_stop_string():
    ids = bytes_of("a###b##", iter([1] * 9))
    deltas, detokenizer = run(BYTE_LEVEL, [], ids, stop=["###!", "a#b"])
    assert deltas == ["", "", "a", "", "###b", "", "", "##"]
    assert detokenizer.stop_reason is None


def test_tokens_after_a_stop_string_are_ignored():
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams(stop="b"))
    assert detokenizer.extend([VOCAB[c] for c in "abab"]) == "a"
    assert (detokenizer.text, detokenizer.num_tokens, detokenizer.push(VOCAB["a"])) == ("a", 2, "")


def test_stop_string_may_be_completed_only_after_min_tokens():
    ids = [VOCAB[c] for c in "abcabc"]
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "abca"), (5, "abcabc")):
        deltas, detokenizer = run(BYTE_LEVEL, [], ids, stop="b", min_tokens=min_tokens)
        assert "".join(deltas) == text
        assert detokenizer.stop_reason == (None if min_tokens == 5 else "b")
    assert run(BYTE_LEVEL, [], [VOCAB["a"]] * 3, stop="aa", min_tokens=2)[1].text == "a"  # the second "aa" counts
    deltas, detokenizer = run(BYTE_LEVEL, [], ids, stop="bca", min_tokens=3)  # begun before, completed after
    assert (deltas[:4], detokenizer.text) == (["a", "", "", ""], "a")


@pytest.mark.parametrize("kwargs", [{"tokenizer": None}, {"tokenizer": BYTE_LEVEL, "detokenize": False}])
def test_without_a_tokenizer_there_is_no_text(kwargs):
    tokenizer = kwargs.pop("tokenizer")
    detokenizer = Detokenizer(tokenizer, [1, 2], SamplingParams(**kwargs))
    assert (detokenizer.extend([1, 2, 3]), detokenizer.finish(), detokenizer.text) == ("", "", "")
    assert detokenizer.num_tokens == 3


@pytest.mark.parametrize("pattern", ["a", "😀", "\ufffd", "\x80bad"])
def test_ten_thousand_tokens_take_linear_work(pattern):
    data = (b"\xff" if pattern == "\x80bad" else pattern.encode()) * 10_000
    ids = [VOCAB[BYTE_CHARS[b]] for b in data[:10_000]]
    before = BYTE_LEVEL.decoded_ids
    deltas, _ = run(BYTE_LEVEL, [VOCAB["a"]] * 50, ids, stop=["stop" * 10])
    assert BYTE_LEVEL.decoded_ids - before < 40 * len(ids)
    assert "".join(deltas) == data[:10_000].decode(errors="replace")
    assert max(map(len, deltas)) <= 4


def test_skipped_tokens_within_a_character_cost_nothing():
    start, *rest = bytes_of("你", iter([1] * 3))
    skipped = [BYTE_LEVEL.backend.token_to_id("<end>"), UNKNOWN_ID] * 2_000
    before = BYTE_LEVEL.decoded_ids
    assert "".join(run(BYTE_LEVEL, [VOCAB["a"]], [start, *skipped, *rest])[0]) == "你"
    assert BYTE_LEVEL.decoded_ids - before < 100
