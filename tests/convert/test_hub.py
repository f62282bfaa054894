"""Local paths as they are, Hub ids downloaded, and a clear word when neither works."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import convert


def test_local_paths_as_they_are(tmp_path, monkeypatch):
    assert convert.resolve(str(tmp_path)) == tmp_path
    assert convert.resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert convert.resolve("~/model") == tmp_path / "model"


def test_neither_a_path_nor_an_id(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such model: .*missing/deeper.*is neither .* nor a Hub id like"):
        convert.resolve(str(tmp_path / "missing" / "deeper"))
    with pytest.raises(FileNotFoundError, match="no such model: 'plainname' is neither a file or folder here"):
        convert.resolve("plainname")


def test_hub_ids_are_downloaded_without_other_formats(monkeypatch, tmp_path):
    asked = download_of(monkeypatch, tmp_path, "model-00001-of-00002.safetensors")
    assert convert.resolve("some-org/Some.Model-1B") == tmp_path
    ((repo, patterns),) = asked
    assert repo == "some-org/Some.Model-1B"
    matches = {
        name: any(Path(name).match(pattern) for pattern in patterns)
        for name in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja")
    }
    assert all(matches.values()), matches
    assert not any(Path(n).match(p) for n in ("pytorch_model.bin", "model.gguf", "a.onnx") for p in patterns)


def test_pytorch_files_are_downloaded_where_there_is_nothing_else(monkeypatch, tmp_path):
    asked = download_of(monkeypatch, tmp_path, "config.json")
    assert convert.resolve("some-org/old-model") == tmp_path
    wanted = ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "config.json")
    assert [[any(Path(n).match(p) for p in patterns) for n in wanted] for _, patterns in asked] == [
        [False, False, True],
        [True, True, True],
    ]


def download_of(monkeypatch, folder, file):
    """What is asked of a Hub that gives `folder`, with `file` in it: (repository, patterns) of each call."""
    asked = []

    def snapshot_download(repo, *, allow_patterns):
        asked.append((repo, allow_patterns))
        (folder / file).touch()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_offline_or_absent(monkeypatch):
    def snapshot_download(repo, **options):
        raise LocalEntryNotFoundError("outgoing traffic has been disabled\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError) as caught:
        convert.resolve("some-org/absent")
    message = str(caught.value)
    assert "no such model: 'some-org/absent' is not a path here" in message
    assert "could not be fetched: outgoing traffic has been disabled. Check the name" in message
