"""Tokenizers built from GGUF metadata cut, merge, add and decode as the models' own do."""

import itertools

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from convert.gguf_tokenizer import build_tokenizer
from convert.tokenizer import load_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
HI = [{"role": "user", "content": "hi"}]


def byte_level(extra=(), merges=(), **values):
    """Metadata of a byte-level BPE: four added tokens, the 256 bytes, `extra`."""
    tokens = ["<bos>", "<eos>", "<tool>", "<unk>", *BYTES, *extra]
    metadata = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3, 3, 4, 2] + [1] * (len(tokens) - 4),
        "merges": list(merges),
        "bos_token_id": 0,
        "eos_token_id": 1,
        **values,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def sentencepiece(pieces, **values):
    """Metadata of a SentencePiece BPE: unknown, BOS, EOS, an added token, the bytes, then `pieces` (text → score)."""
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 260 + list(pieces.values()),
        "token_type": [2, 3, 3, 4] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **values,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def tokens_of(tokenizer, text, **kwargs):
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **kwargs))


def parts(pre, text):
    """What the pre-tokenizer cuts `text` into."""
    backend = build_tokenizer(byte_level(pre=pre, add_bos_token=False), "x").backend_tokenizer
    return [backend.decoder.decode([part]) for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


TEXT = "I'LLx say don't  1234 é世!?\n\n x\t"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", "I|'|LLx| say| don|'t|  |1|2|3|4| é世|!?|\n\n| x|\t"),
        ("gpt-2", "I|'|LLx| say| don|'t| | 1234| é世|!?|\n\n| x|\t"),
        ("default", "I|'|LLx| say| don|'t| | 1234| é世|!?|\n\n| x|\t"),
        ("llama-bpe", "I|'LL|x| say| don|'t| | |123|4| é世|!?\n\n| x|\t"),
        ("qwen2", "I|'LL|x| say| don|'t| | |1|2|3|4| é世|!?\n\n| x|\t"),
    ],
)
def test_pre_tokenizers(pre, expected):
    assert parts(pre, TEXT) == expected.split("|")


@given(st.text(), st.sampled_from(["smollm", "gpt-2", "llama-bpe"]))
def test_byte_level_round_trip(text, pre):
    tokenizer = build_tokenizer(byte_level(pre=pre), "x")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_merges_apply_in_their_order():
    tokenizer = build_tokenizer(byte_level(["bc", "ab"], ["b c", "a b"], pre="gpt-2"), "x")
    assert tokens_of(tokenizer, "abc ab") == ["a", "bc", "Ġ", "ab"]


def test_whole_parts_beat_merges_only_where_the_model_was_trained_so():
    metadata = {"extra": ["bc", "abc"], "merges": ["b c"], "add_bos_token": False}
    assert tokens_of(build_tokenizer(byte_level(**metadata, pre="llama-bpe"), "x"), "abc") == ["abc"]
    assert tokens_of(build_tokenizer(byte_level(**metadata, pre="gpt-2"), "x"), "abc") == ["a", "bc"]


def test_qwen2_composes_characters():
    tokenizer = build_tokenizer(byte_level(pre="qwen2"), "x")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_token_types():
    tokenizer = build_tokenizer(byte_level(pre="gpt-2"), "x")
    ids = tokenizer.encode("a<eos><tool>b<unk>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<eos>", "<tool>", "b", "<unk>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


@pytest.mark.parametrize(
    ("pre", "values", "expected"),
    [
        ("gpt-2", {}, ["a"]),
        ("llama-bpe", {}, ["<bos>", "a"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ["<bos>", "a", "<eos>"]),
    ],
)
def test_what_is_added_to_a_plain_text(pre, values, expected, tmp_path):
    tokenizer = build_tokenizer(byte_level(pre=pre, **values), "x")
    assert tokens_of(tokenizer, "a") == expected
    assert tokens_of(tokenizer, "a", add_special_tokens=False) == ["a"]
    tokenizer.save_pretrained(tmp_path)
    assert tokens_of(load_tokenizer(tmp_path), "a") == expected


def test_special_token_ids():
    tokenizer = build_tokenizer(byte_level(unknown_token_id=3, padding_token_id=1), "x")
    found = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id]
    assert found == [0, 1, 3, 1]
    assert build_tokenizer(byte_level(), "x").pad_token_id is None
    assert len(tokenizer) == 260


def test_chat_templates():
    one = {**byte_level(), "tokenizer.chat_template": "one"}
    assert build_tokenizer(one, "x").apply_chat_template(HI, tokenize=False) == "one"
    several = build_tokenizer({**one, "tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "two"}, "x")
    assert several.apply_chat_template(HI, tokenize=False) == "one"
    assert several.apply_chat_template(HI, tokenize=False, chat_template="rag") == "two"
    assert build_tokenizer(byte_level(), "x").chat_template is None


def reference_merge(text, scores):
    """SentencePiece's BPE: of all neighbours that join into a piece, the best score first, then the leftmost."""
    symbols = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not joins:
            return symbols
        i = min(joins)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@st.composite
def piece_scores(draw):
    """Pieces of a, b and ▁, the single ones among them, in any order of score."""
    pieces = {"▁", "a", "b", *draw(st.lists(st.text("ab▁", min_size=2, max_size=4), max_size=12))}
    return {piece: -float(rank) for rank, piece in draw(st.permutations(list(enumerate(sorted(pieces)))))}


@given(piece_scores(), st.text("ab ▁", max_size=24))
def test_sentencepiece_merges_by_score(scores, text):
    tokenizer = build_tokenizer(sentencepiece(scores), "x")
    escaped = "▁" + text.replace(" ", "▁") if text else ""
    assert tokens_of(tokenizer, text, add_special_tokens=False) == reference_merge(escaped, scores)


PIECES = {"▁h": -0.0, "el": -1.0, "▁hel": -2.0, "lo": -3.0, "▁▁": -4.0, **dict.fromkeys("▁helo\n", -9.0)}


def test_sentencepiece_by_hand():
    tokenizer = build_tokenizer(sentencepiece(PIECES), "x")
    assert tokens_of(tokenizer, "hello") == ["<s>", "▁hel", "lo"]
    assert tokens_of(tokenizer, " hello  \n") == ["<s>", "▁", "▁hel", "lo", "▁▁", "\n"]
    assert tokens_of(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(tokenizer, "") == ["<s>"]
    assert tokenizer.decode(tokenizer.encode("  h"), skip_special_tokens=True) == "  h"
    assert tokens_of(tokenizer, "h</s>h<tool>") == ["<s>", "▁h", "</s>", "▁h", "<tool>"]


def test_sentencepiece_without_prefix():
    tokenizer = build_tokenizer(sentencepiece(PIECES, add_space_prefix=False, add_bos_token=False), "x")
    assert tokens_of(tokenizer, "hello hello") == ["h", "el", "lo", "▁hel", "lo"]
    assert tokenizer.decode(tokenizer.encode(" h")) == " h"


@given(st.text(), st.booleans())
def test_sentencepiece_round_trip(text, prefix):
    tokenizer = build_tokenizer(sentencepiece(PIECES, add_space_prefix=prefix), "x")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")


def test_sentencepiece_joins_only_normal_pieces():
    metadata = sentencepiece({**PIECES, "he": 5.0})
    metadata["tokenizer.ggml.token_type"][-1] = 5
    assert tokens_of(build_tokenizer(metadata, "x"), "hel")[1:] == ["▁hel"]


def test_a_gguf_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in byte_level(["Ã©"], pre="smollm", add_bos_token=True).items():
        if key.endswith("merges"):
            continue
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](key, value)
    writer.add_token_merges(["Ã ©"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert tokens_of(load_tokenizer(tmp_path / "m.gguf"), "12é") == ["<bos>", "1", "2", "Ã©"]
    assert tokens_of(load_tokenizer(tmp_path), "c") == ["<bos>", "c"]


def test_what_is_not_supported_is_refused_by_name():
    with pytest.raises(ValueError, match="tokenizer model 'bert' is not supported; supported: gpt2, llama"):
        build_tokenizer(byte_level(model="bert"), "x")
    with pytest.raises(
        ValueError, match=r"f\.gguf: pre-tokenizer 'tekken' is not supported; supported: smollm, llama-b"
    ):
        build_tokenizer(byte_level(pre="tekken"), "f.gguf")
    with pytest.raises(ValueError, match="remove_extra_whitespaces is set, which is not supported"):
        build_tokenizer(sentencepiece({}, remove_extra_whitespaces=True), "x")


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="260 tokens but 1 token types"):
        build_tokenizer(byte_level(token_type=[1]), "x")
    with pytest.raises(ValueError, match=r"tokens listed twice: \['<bos>'\]"):
        build_tokenizer(byte_level(["<bos>"]), "x")
    with pytest.raises(ValueError, match="eos_token_id is 260; there are 260 tokens"):
        build_tokenizer(byte_level(eos_token_id=260), "x")
    with pytest.raises(ValueError, match="scores must hold one score for each of 260 tokens"):
        build_tokenizer(sentencepiece({}, scores=[1.0]), "x")
    metadata = byte_level(add_bos_token=True)
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match=r"BOS is to be added to every text, but tokenizer\.ggml\.bos_token_id"):
        build_tokenizer(metadata, "x")
    with pytest.raises(ValueError, match=r"merges \['a b', 'c'\] do not join two tokens into a third"):
        build_tokenizer(byte_level(["bc"], ["a b", "b c", "c"]), "x")
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ValueError, match="merges is missing"):
        build_tokenizer(metadata, "x")
    with pytest.raises(FileNotFoundError, match="x holds no tokenizer; use a GGUF file with one"):
        build_tokenizer({"general.name": "x"}, "x")
