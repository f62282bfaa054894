"""Prompts, chats and texts, as a tokenizer with every special habit gives them."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxinfer import SamplingParams, chat
from jaxinfer.engine.detokenizer import Detokenizer
from jaxinfer.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}bot:{% if shout %}!{% endif %}{% endif %}"
)


def make_raw(template=TEMPLATE, **kwargs):
    """Words of single letters, BOS added to plain prompts; `<tool>` is added but not special."""
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1, "▁": 2, "<0xC3>": 3, "<0xA9>": 4}
    vocab |= {c: 5 + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz:!.,▁")} | {"▁hi": 40}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    raw = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", add_bos_token=True, **kwargs
    )
    raw.chat_template = template
    return raw


@pytest.fixture
def tokenizer():
    return Tokenizer(make_raw())


def test_a_plain_prompt_gets_the_default_special_tokens(tokenizer):
    assert tokenizer.decode(tokenizer.encode("hi"), skip_special_tokens=False) == "<s>hi"
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_id == 1


def test_a_long_prompt_is_neither_cut_nor_warned_about(caplog):
    tokenizer = Tokenizer(make_raw(model_max_length=4))
    assert len(tokenizer.encode("a" * 50)) == 51
    assert not caplog.records


def test_a_chat_has_one_bos(tokenizer):
    ids = tokenizer.encode_chat(HI)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user:hi</s>bot:"
    assert ids.count(0) == 1


def test_a_template_without_bos_gets_none():
    ids = Tokenizer(make_raw("{{ messages[0].content }}")).encode_chat(HI)
    assert 0 not in ids


def test_template_arguments_and_generation_prompt(tokenizer):
    def render(**kwargs):
        return tokenizer.decode(tokenizer.encode_chat(HI, **kwargs), skip_special_tokens=False)

    assert render(add_generation_prompt=False) == "<s>user:hi</s>"
    assert render(shout=True) == "<s>user:hi</s>bot:!"
    assert render(chat_template="{{ 'x' }}") == "x"


def test_named_templates():
    tokenizer = Tokenizer(make_raw({"default": "d", "loud": "l", "tool_use": "t"}))
    assert tokenizer.decode(tokenizer.encode_chat(HI)) == "d"
    assert tokenizer.decode(tokenizer.encode_chat(HI, chat_template="loud")) == "l"
    assert tokenizer.decode(tokenizer.encode_chat(HI, tools=[])) == "t"


def test_no_template_says_what_to_do():
    with pytest.raises(ValueError, match=r"no chat template; pass chat_template= .* or write the prompt as plain text"):
        Tokenizer(make_raw(None)).encode_chat(HI)


def test_what_the_template_refuses_is_an_error_of_the_request():
    tokenizer = Tokenizer(make_raw("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="chat template refuses these messages: roles must alternate"):
        tokenizer.encode_chat(HI)


TEMPLATES = {
    "takes them apart": "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}",
    "adds": "{{ messages[0]['content'] + '' }}",
    "prints": "{{ messages[0].content }}",
    "trims": "{{ messages[0]['content'] | trim }}",
    "splits": "{{ messages[0].content.split('x')[0] }}",
    "drops": "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_in_parts_is_never_printed_nor_lost(name):
    content = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    raw = make_raw(TEMPLATES[name])
    text = chat.rendered([{"role": "user", "content": content}], lambda t: raw.apply_chat_template(t, tokenize=False))
    assert text == ("<hi><there>" if name == "takes them apart" else "hi\nthere")


def test_what_the_template_leaves_out_is_said(caplog):
    tokenizer = Tokenizer(make_raw("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))
    turns = [{"role": "system", "content": " Be brief. "}, *HI, {"role": "assistant", "content": "ho"}, *HI]
    assert tokenizer.decode(tokenizer.encode_chat(turns)) == "hihi"
    [record] = caplog.records
    assert record.getMessage() == "the model's chat template leaves out message 0, of the role system"


@pytest.mark.parametrize("fault", ["1 / 0", "messages[0].content + 1", "messages[7].content.x"])
def test_any_fault_of_a_template_is_an_error_of_the_request(fault):
    with pytest.raises(ValueError, match="chat template refuses these messages"):
        Tokenizer(make_raw("{{ " + fault + " }}")).encode_chat(HI)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "a chat is a list of messages, not str"),
        ({"role": "user", "content": "hi"}, "a chat is a list of messages, not dict"),
        ([], "the chat has no messages"),
        (["hi"], "message 0 is str; it must be a dict"),
        ([*HI, {"content": "x"}], r"message 1 has no role; it has \['content'\]"),
        ([{}], "message 0 has no role and no content"),
        ([{"role": 1, "content": "x"}], "message 0 has role 1; it must be a string"),
        ([{"role": "user", "content": 3}], "message 0 has content of type int; it must be a string"),
        ([{"role": "user", "content": None}], "message 0 has content of type NoneType; .* holds tool calls"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 has the part .*; only text is read"),
        ([{"role": "user", "content": ["hi"]}], "message 0 has the part 'hi'; only text"),
    ],
)
def test_malformed_messages(tokenizer, messages, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(messages)


def test_decode_keeps_spaces_and_skips_special_tokens_when_asked():
    names = ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    tokenizer = Tokenizer(make_raw(**dict.fromkeys(names, True)))
    assert tokenizer.raw.decode(tokenizer.encode("a , b .")[1:]) == "a, b."
    ids = [*tokenizer.encode("a , b ."), 1, tokenizer.raw.convert_tokens_to_ids("<tool>")]
    assert tokenizer.decode(ids) == "a , b .<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a , b .</s><tool>"


def test_renders_is_what_decode_shows(tokenizer):
    for skip in (True, False):
        for token_id in range(tokenizer.vocab_size + 20):
            shown = tokenizer.decode([5, token_id], skip_special_tokens=skip) != "a"
            assert tokenizer.renders(token_id, skip) == shown, (token_id, skip)


def test_token_text_keeps_the_leading_space(tokenizer):
    assert tokenizer.decode([40]) == "hi"
    assert tokenizer.token_text(40) == " hi"
    assert tokenizer.token_text(0) == "<s>"
    assert tokenizer.token_text(3) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.token_text(10_000) == ""


def test_vocab_size_counts_added_tokens(tokenizer):
    assert tokenizer.vocab_size == len(tokenizer.raw.get_vocab())
    assert tokenizer.vocab_size > tokenizer.raw.vocab_size


def test_a_detokenizer_takes_it(tokenizer):
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"), SamplingParams())
    assert [detokenizer.push(i) for i in (40, 1, 3, 4)] == [" hi", "", "", "é"]


def test_load_reads_a_folder(tmp_path, tokenizer):
    tokenizer.raw.save_pretrained(tmp_path)
    assert Tokenizer.load(str(tmp_path)).encode_chat(HI) == tokenizer.encode_chat(HI)


def test_a_tokenizer_written_in_python_is_refused():
    from transformers import ByT5Tokenizer

    with pytest.raises(ValueError, match=r"ByT5Tokenizer is a tokenizer written in Python, .* with a tokenizer\.json"):
        Tokenizer(ByT5Tokenizer())
