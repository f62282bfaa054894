"""Texts to vectors: as transformers computes them, however many share the batch, by whatever mesh and pooling."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

import convert
from convert.sentence import TextConfig, copy_sentence_files, pooling_config, text_config
from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.embedder import POOLINGS, Embedder, pool
from jaxinfer.export import export_forward
from tests import tiny, tiny_families

TOLERANCE = 5e-6
"""Of an element of a vector of length 1."""
SETTINGS = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "warm_up": False,
    "progress": False,
}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "hello", "world", "the", "sky", "is", "blue"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def llms(folder):
    """`llms(case, **settings)`: the same one when asked again."""
    made = {}

    def make(case, **settings):
        key = case, *settings.items()
        if key not in made:
            path = folder / case
            made[key] = LLM(str(path if path.exists() else tiny.write_checkpoint(case, path)), **SETTINGS | settings)
        return made[key]

    return make


def ids(count, start=0):
    return {"prompt_token_ids": [4 + (start + 37 * i) % 90 for i in range(count)]}


def vectors(outputs):
    return np.stack([output.embedding for output in outputs])


@pytest.mark.parametrize("case", [*tiny_families.ENCODERS, "qwen3"])
def test_parity_with_transformers_among_others(case, llms, golden):
    expected = golden(f"hidden_{case}")
    assert expected["weights_sha256"] == tiny.sha256(tiny.weights(case))
    assert expected["hidden"].std(axis=0).mean() > 0.4, "tokens differ"
    llm = llms(case)
    text = {"prompt_token_ids": expected["prompt_ids"].tolist()}
    for pooling in POOLINGS:
        found = llm.embed([ids(9), text, ids(15)], pooling=pooling)[1]
        assert found.embedding.dtype == np.float32
        assert np.abs(found.embedding - expected[pooling]).max() <= TOLERANCE, pooling
    [found] = llm.embed(text, pooling="last", normalize=False)
    assert np.abs(found.embedding - expected["hidden"][-1]).max() <= 10 * TOLERANCE


def test_parity_on_two_devices(llms, golden):
    expected = golden("hidden_roberta")
    llm = llms("roberta", tensor_parallel_size=2)
    [found] = llm.embed({"prompt_token_ids": expected["prompt_ids"].tolist()}, pooling="mean")
    assert np.abs(found.embedding - expected["mean"]).max() <= TOLERANCE


def test_vectors_do_not_depend_on_who_shares_the_batch(llms):
    llm = llms("bert")
    texts = [ids(length, start) for start, length in enumerate([1, 2, 7, 8, 9, 64, 33, 3, 1, 40, 16, 5, 5])]
    alone = np.concatenate([vectors(llm.embed(text)) for text in texts])
    together = vectors(llm.embed(texts))
    assert np.abs(together - alone).max() <= 1e-6
    np.testing.assert_allclose(np.linalg.norm(together, axis=-1), 1.0, rtol=1e-6)
    assert len(np.unique(together.round(3), axis=0)) == len(texts)
    assert [len(output.prompt_token_ids) for output in llm.embed(texts)] == [len(t["prompt_token_ids"]) for t in texts]
    assert llm.embed([]) == []


def test_what_is_no_number_stays_in_its_text():
    hidden = jnp.ones((8, 2)).at[1, 0].set(jnp.nan).at[6:].set(jnp.nan)  # the last two are padding
    starts = jnp.asarray([0, 2, 6, 6])
    for number, name in enumerate(POOLINGS):
        found = np.isnan(np.asarray(pool(hidden, starts, jnp.int32(number)))).any(-1)
        assert found[:2].tolist() == [name != "cls", False]


def test_every_program_is_there_after_the_warm_up(llms, monkeypatch):
    llm = llms("bert", warm_up=True, max_num_batched_tokens=16)
    monkeypatch.setattr(Embedder, "lower", None)
    assert [output.embedding.shape for output in llm.embed([ids(n) for n in (1, 4, 11, 16, 2)])] == [(32,)] * 5


def test_an_encoder_generates_nothing(llms, folder, tmp_path):
    llm = llms("bert")
    refusal = "bert is an encoder: it embeds text and generates none; use LLM.embed"
    calls = [
        lambda: llm.generate(ids(3)),
        lambda: llm.stream(ids(3)),
        lambda: llm.chat([{"role": "user", "content": "hello"}]),
        lambda: llm.stream_chat([{"role": "user", "content": "hello"}]),
        lambda: llms("bert", task="generate"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=refusal):
            call()
    with pytest.raises(ValueError, match=r"to embed takes no cache: leave out kv_cache_dtype and num_pages"):
        llms("bert", num_pages=3)
    with pytest.raises(ValueError, match="has no head, so no logits; only models that generate are exported"):
        export_forward(convert.open_checkpoint(folder / "bert"), tmp_path / "made", length=8)


def test_a_decoder_generates_and_embeds_the_last_token_unless_it_is_made_for_vectors_alone(llms, golden):
    expected = golden("hidden_qwen3")
    text = {"prompt_token_ids": expected["prompt_ids"].tolist()}
    llm = llms("qwen3")
    [output] = llm.generate(text, SamplingParams(max_tokens=1, temperature=0.0))
    assert len(output.outputs[0].token_ids) == 1
    assert np.abs(llm.embed(text)[0].embedding - expected["last"]).max() <= TOLERANCE
    with pytest.raises(ValueError, match="this LLM was made with task='embed', and only embeds"):
        llms("qwen3", task="embed").generate(text)
    with pytest.raises(ValueError, match="task is 'rank'; it must be 'embed', 'generate', or None"):
        llms("qwen3", task="rank")


def test_a_decoder_that_was_saved_without_its_head(folder, tmp_path, llms):
    """As e5-mistral and its like are: names without a prefix, and no head."""
    llms("qwen3")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tiny.weights("qwen3").items()}
    tiny.write_config({**tiny.CASES["qwen3"], "tie_word_embeddings": False}, tmp_path)
    tiny.write_safetensors(tensors, tmp_path)
    bare, whole = convert.open_checkpoint(tmp_path), convert.open_checkpoint(folder / "qwen3")
    assert bare.config == dataclasses.replace(whole.config, tied_head=False, headless=True)
    assert list(bare.sources) == list(whole.sources)
    for path in whole.sources:
        np.testing.assert_array_equal(bare.read(path, np.float32), whole.read(path, np.float32))
    with pytest.raises(ValueError, match="the checkpoint has no head: it embeds text and generates none"):
        LLM(str(tmp_path), task="generate")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([ids(65)], {}, r"text 0 has 65 tokens, and max_num_batched_tokens is 64: shorten it.* pass truncate=True"),
        ([ids(3), {"prompt_token_ids": []}], {}, "text 1 is empty; give it at least one token"),
        ([{"prompt_token_ids": [5, 99]}], {}, r"text 0: token ids \[99\] are outside the vocabulary of 99"),
        ([ids(3)], {"pooling": "max"}, "pooling is 'max'; it must be one of cls, mean, last, or None"),
        (["hello"], {}, "this LLM has no tokenizer"),
        ([3], {}, "a prompt is text, .*; got 3"),
    ],
)
def test_refused(prompts, options, message, llms):
    with pytest.raises(ValueError, match=message):
        llms("bert").embed(prompts, **options)


def test_projections_in_8_bits(llms, golden):
    expected = golden("hidden_bert")
    llm = llms("bert", quantization="int8", dtype="bfloat16")
    [found] = llm.embed({"prompt_token_ids": expected["prompt_ids"].tolist()}, pooling="cls")
    assert 0.9 < float(found.embedding @ expected["cls"]) < 0.99999


def write_sentence_files(folder, modules=("Transformer", "Pooling", "Normalize"), pooling=None):
    """As sentence-transformers writes them."""
    named = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(named))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or flags))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6, "do_lower_case": true}')
    prompts = {"prompts": {"query": "The "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def write_tokenizer(folder):
    """[CLS] words [SEP]"""
    backend = Tokenizer(token_models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=special)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    folder = tiny.write_checkpoint("bert", tmp_path_factory.mktemp("sentences") / "bert")
    write_tokenizer(folder)
    write_sentence_files(folder)
    return folder


def test_the_files_of_sentence_transformers_are_heeded(sentences, tmp_path):
    """Pooling, scale, length, case and prefix; also by a native checkpoint, and by what is exported from it."""
    settings = SETTINGS | {"skip_tokenizer_init": False, "max_num_batched_tokens": 16}
    llm = LLM(str(sentences), **settings)
    [output] = llm.embed("Sky \n")
    assert (output.prompt, output.prompt_token_ids) == ("Sky \n", [1, 6, 7, 2])
    text = {"prompt_token_ids": output.prompt_token_ids}
    [cls, mean, raw] = [
        llm.embed(text, **options)[0].embedding
        for options in ({"pooling": "cls"}, {"pooling": "mean"}, {"normalize": False})
    ]
    np.testing.assert_array_equal(output.embedding, cls)
    np.testing.assert_array_equal(output.embedding, raw / np.linalg.norm(raw))
    assert np.abs(cls - mean).max() > 0.01
    with pytest.raises(ValueError, match="text 0 has 7 tokens, and max_model_len is 6"):
        llm.embed("sky is blue world")
    [cut] = llm.embed("sky is blue world", truncate=True)
    assert cut.prompt_token_ids == [1, 6, 7, 8, 9, 2]
    assert llm.embed({"prompt_token_ids": list(range(4, 14))}, truncate=True)[0].prompt_token_ids == [4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="the 2 special tokens around a text leave no room for it in 2 tokens"):
        llm.get_tokenizer().encode_start("sky", 2)

    source = convert.open_checkpoint(sentences)
    native = convert.save_native(source, tmp_path / "native", tokenizer=llm.get_tokenizer().raw, progress=False)
    back = convert.save_safetensors(convert.open_checkpoint(native), tmp_path / "back", progress=False)
    stored, exported = load_file(sentences / "model.safetensors"), load_file(back / "model.safetensors")
    assert stored.keys() == exported.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)
    assert pooling_config(back) == pooling_config(native) == pooling_config(sentences) == ("cls", True)
    assert text_config(back) == text_config(native) == TextConfig(6, strip=True, lower_case=True, prefix="The ")
    assert list((back / "1_Pooling").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules": ("Transformer", "Pooling", "Dense")}, "has a module 'Dense', which is not supported"),
        ({"pooling": [1]}, "1_Pooling/config.json holds no object"),
        ({"modules": ("Transformer", "Normalize")}, "has no module 'Pooling'; pass pooling and normalize"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "'pooling_mode_max_tokens' is True; only False"),
        ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}}, "chooses 2 ways of pooling"),
        (
            {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_new": True}},
            "fields not understood: 'pooling_mode_n",
        ),
        ({"pooling": {"pooling_mode": "max"}}, "'pooling_mode' is 'max', which is not supported; supported: cls, mean"),
    ],
)
def test_files_that_ask_for_more_are_refused(change, message, tmp_path):
    write_sentence_files(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        pooling_config(tmp_path)


@pytest.mark.parametrize("model", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_a_file_of_lengths_has_one_of_many_names(model, tmp_path):
    write_sentence_files(tmp_path)
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / f"sentence_{model}_config.json")
    made = tmp_path / "made"
    copy_sentence_files(tmp_path, made)
    assert text_config(made).max_length == 6


def test_a_text_is_stripped_with_its_prefix_and_then_lower_cased():
    """The prefix's end is not the text's end."""
    assert TextConfig(strip=True, prefix=" The ").applied("\tSky ") == "The \tSky"
    assert TextConfig(strip=True, lower_case=True, prefix="The ").applied("") == "the"
    assert TextConfig().applied(" Sky ") == " Sky "


@pytest.mark.parametrize(
    ("prompts", "name", "message"),
    [
        (None, "query", "'default_prompt_name' is 'query', which is not supported"),
        ({"query": 3}, "query", "'prompts' must map names to texts"),
        (["query"], "query", "'prompts' must map names to texts"),
        ({"query": "a"}, ["query"], "'prompts' must map names to texts"),
    ],
)
def test_prompts_that_are_no_texts_are_refused(prompts, name, message, tmp_path):
    write_sentence_files(tmp_path)
    values = {"prompts": prompts, "default_prompt_name": name}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"config_sentence_transformers\.json: {message}"):
        text_config(tmp_path)


def test_files_are_not_asked_for_what_the_caller_says(sentences, monkeypatch):
    monkeypatch.setattr("jaxinfer.embed.pooling_config", None)
    llm = LLM(str(sentences), **SETTINGS)
    assert llm.embed(ids(3), pooling="mean", normalize=True)[0].embedding.shape == (32,)
