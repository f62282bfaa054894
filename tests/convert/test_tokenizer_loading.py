"""A checkpoint's tokenizer is found wherever the checkpoint's form keeps it, and what is missing is said."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from convert.tokenizer import load_tokenizer, without_torch_advice

with without_torch_advice():
    from transformers import PreTrainedTokenizerFast

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder's tokenizer, without a template."""
    backend = Backend(models.WordLevel({"<s>": 0, "hi": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    raw = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>", add_bos_token=True)
    raw.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def set_config(folder, **values):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def render(folder, **kwargs):
    return load_tokenizer(folder).apply_chat_template(HI, tokenize=False, **kwargs)


def test_a_hugging_face_folder(folder):
    assert load_tokenizer(folder).encode("hi") == [0, 1]


def test_a_native_folder(folder):
    native = folder.with_name("native")
    native.mkdir()
    folder.rename(native / "tokenizer")
    assert load_tokenizer(native).encode("hi") == [0, 1]


def test_a_config_beside_it_may_be_of_any_family(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert load_tokenizer(folder).encode("hi") == [0, 1]


def test_no_template(folder):
    assert load_tokenizer(folder).chat_template is None


def test_template_in_tokenizer_config(folder):
    set_config(folder, chat_template="config")
    assert render(folder) == "config"


def test_named_templates_in_tokenizer_config(folder):
    named = [{"name": "default", "template": "first"}, {"name": "rag", "template": "second"}]
    set_config(folder, chat_template=named)
    assert [render(folder), render(folder, chat_template="rag")] == ["first", "second"]


def test_template_file_comes_before_tokenizer_config(folder):
    set_config(folder, chat_template="config")
    (folder / "chat_template.jinja").write_text("file")
    assert render(folder) == "file"


@pytest.mark.parametrize("default_in", ["chat_template.jinja", "tokenizer_config.json"])
def test_additional_templates(folder, default_in):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("second")
    if default_in == "tokenizer_config.json":
        set_config(folder, chat_template="first")
    else:
        (folder / default_in).write_text("first")
    assert [render(folder), render(folder, chat_template="rag")] == ["first", "second"]


def test_legacy_template_file(folder):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}))
    assert render(folder) == "legacy"


def test_code_in_the_checkpoint_is_never_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    set_config(folder, auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil")
    with pytest.raises(ValueError, match=f"cannot read the tokenizer in {folder}"):
        load_tokenizer(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "Rot13"}}'])
def test_damaged_files(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"cannot read the tokenizer in {folder}"):
        load_tokenizer(folder)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at .*nowhere; give a"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"holds no tokenizer .*; copy the model's tokenizer files there, or run"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"weights\.bin is a file but no \.gguf"):
        load_tokenizer(tmp_path / "weights.bin")
    (tmp_path / "m.gguf").write_bytes(b"ZIP!")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_tokenizer(tmp_path / "m.gguf")


def test_only_the_advice_about_torch_is_silenced(folder):
    code = f"""
import logging, pathlib, sys
from convert.tokenizer import load_tokenizer, without_torch_advice
load_tokenizer(pathlib.Path({str(folder)!r}))
with without_torch_advice():
    logging.getLogger("transformers").warning("heard")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert result.stderr.splitlines() == ["[transformers] heard"]
