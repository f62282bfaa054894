"""A conversion that was interrupted leaves nothing that loads, and goes on where it was."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.destination import check_destination, fingerprint, resumable, whole_or_not_at_all
from convert.journal import Journal
from convert.tensors import Stored
from jaxinfer.config import Quantization
from tests import tiny

CODE = (
    "import os, sys, convert\nfrom convert import manifest\n"
    "manifest.Manifest.write = lambda self, folder: os.kill(os.getpid(), 9)\n"
    "convert.save_native(convert.open_checkpoint(sys.argv[1]), sys.argv[2], progress=False)\n"
)

PARTS = [
    b'{"part": "part"}',
    b'{"part": ["part"], "files": {"part": [0, 0]}}',
    b'{"part": "part", "files": {}}',
    b"[1]",
]


@pytest.fixture
def source(tmp_path):
    return convert.open_checkpoint(tiny.write_checkpoint("llama", tmp_path / "hf"))


@pytest.fixture(autouse=True)
def single_arrays(monkeypatch):
    monkeypatch.setattr("convert.late._BATCH_BYTES", 1)


class Counted:
    """The bytes that are read from sources; an error once there are as many as `until`."""

    def __init__(self, monkeypatch, until=None):
        self.bytes, original = 0, Stored.read

        def read(stored, start, stop):
            rows = original(stored, start, stop)
            self.bytes += rows.nbytes
            if until is not None and self.bytes > until:
                raise KeyboardInterrupt
            return rows

        monkeypatch.setattr(Stored, "read", read)


def files(folder):
    """Bytes of every file but those in which Orbax notes time and place."""
    found = [file for file in folder.rglob("*") if file.is_file()]
    noted = ("_CHECKPOINT_METADATA", "commit_success.txt")
    return {str(file.relative_to(folder)): file.read_bytes() for file in found if file.name not in noted}


def interrupted(monkeypatch, save, source, target, until):
    with monkeypatch.context() as patched:
        Counted(patched, until)
        with pytest.raises(KeyboardInterrupt):
            save(source, target)


def native(source, target, **options):
    return convert.save_native(source, target, progress=False, **options)


def exported(source, target, **options):
    return convert.save_safetensors(source, target, progress=False, shard_bytes=40_000, **options)


@pytest.mark.parametrize(
    ("save", "options"),
    [
        (native, {}),
        (native, {"quantization": Quantization("int8")}),
        (native, {"ready": {"final_norm.scale": np.ones(64, np.float32)}, "ready_of": "a text"}),
        (exported, {}),
    ],
    ids=["native", "int8", "ready", "safetensors"],
)
def test_it_goes_on_where_it_was(save, options, source, tmp_path, monkeypatch, caplog):
    """Interrupted twice: of half of the source, and of what is left."""
    whole = save(source, tmp_path / "whole", **options)
    total = sum(info.nbytes for info in source.tensors.values())
    target = tmp_path / "target"
    interrupted(monkeypatch, lambda *a: save(*a, **options), source, target, total // 2)
    assert not target.exists()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        convert.open_checkpoint(tmp_path / ".target.partial")
    interrupted(monkeypatch, lambda *a: save(*a, **options), source, target, total // 5)
    assert caplog.text.count("the same command again goes on there") == 2
    counted = Counted(monkeypatch)
    save(source, target, **options)
    assert 0 < counted.bytes < 0.55 * total
    assert files(target) == files(whole)
    assert not list(tmp_path.glob(".*"))


def test_weights_of_unknown_making_are_not_kept(source, tmp_path, monkeypatch):
    ready = {"final_norm.scale": np.ones(64, np.float32)}
    interrupted(monkeypatch, lambda *a: native(*a, ready=ready), source, tmp_path / "target", 250_000)
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_array_is_noticed(source, tmp_path, monkeypatch, caplog):
    """One that is cut short, one whose bytes are others, one that is gone; and a journal cut short."""
    whole = native(source, tmp_path / "whole")
    interrupted(monkeypatch, native, source, tmp_path / "target", 250_000)
    partial = tmp_path / ".target.partial"
    lines = [json.loads(line) for line in (partial / "journal.jsonl").read_text().splitlines()]
    parts = [line["part"] for line in lines[1:]]
    assert len(parts) > 5
    data = [next((partial / f"weights.orbax-checkpoint-tmp/{part}").glob("0*")) for part in parts]
    os.truncate(data[0], data[0].stat().st_size - 4)
    data[1].write_bytes(bytes(data[1].stat().st_size))
    data[2].unlink()
    text = (partial / "journal.jsonl").read_text()
    (partial / "journal.jsonl").write_text(text[:-20])
    native(source, tmp_path / "target")
    for part in parts[:3]:
        assert f"earlier/{part} is damaged, so it is written again" in caplog.text
    assert caplog.text.count(" is damaged") == 3
    assert files(tmp_path / "target") == files(whole)


def test_other_settings_or_another_source_start_over(source, tmp_path, monkeypatch, caplog):
    target = tmp_path / "target"
    interrupted(monkeypatch, native, source, target, 150_000)
    native(source, target, dtype="bfloat16")
    assert "was begun with other settings, or of another source: starting over" in caplog.text
    assert files(target) == files(native(source, tmp_path / "whole", dtype="bfloat16"))
    before = fingerprint(source, dtype="float32")
    assert before == fingerprint(source, dtype="float32") != fingerprint(source, dtype="float16")
    os.utime(source.path / "model.safetensors", ns=(1, 1))
    assert fingerprint(source, dtype="float32") != before


def test_a_killed_process_leaves_nothing_that_loads(source, tmp_path, monkeypatch):
    """All weights were written, so none is read again."""
    target, partial = tmp_path / "native", tmp_path / ".native.partial"
    result = subprocess.run([sys.executable, "-c", CODE, str(source.path), str(target)], check=False)
    assert result.returncode == -9
    assert partial.exists()
    assert not target.exists()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        convert.open_checkpoint(partial)
    counted = Counted(monkeypatch)
    native(source, target)
    assert counted.bytes == 0
    assert not partial.exists()
    assert convert.open_checkpoint(target).config == source.config


def test_a_failure_before_anything_is_finished_leaves_nothing(tmp_path):
    def write():
        with whole_or_not_at_all(tmp_path / "x") as folder:
            (folder / "file").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert not list(tmp_path.iterdir())


def test_a_failure_keeps_what_it_was_to_replace(source, tmp_path):
    class Broken:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    native(source, tmp_path / "native")
    with pytest.raises(OSError, match="disk full"):
        native(source, tmp_path / "native", dtype="float16", tokenizer=Broken(), force=True)
    assert convert.open_checkpoint(tmp_path / "native").dtype == "float32"


def test_two_at_once_are_refused(tmp_path):
    with resumable(tmp_path / "x", "a"), pytest.raises(FileExistsError, match="another process is writing to"):
        resumable(tmp_path / "x", "a").__enter__()
    assert (tmp_path / "x").is_dir()


@pytest.mark.parametrize("place", ["native", "nowhere"])
def test_a_link_is_not_replaced(place, tmp_path):
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "jaxinfer.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / place)
    with pytest.raises(FileExistsError, match=f"link is a link, which cannot be replaced; .*/{place}"):
        check_destination(tmp_path / "link", force=True)


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for path in (".", "..", tmp_path / "below"):
        with pytest.raises(FileExistsError, match="is the current folder or around it, so it cannot be replaced"):
            check_destination(Path(path), force=True)


def test_a_kill_while_the_old_is_replaced_loses_neither(tmp_path, monkeypatch):
    """Of the two moves, the second does not happen; the same again ends as if nothing had been."""
    target, original = tmp_path / "x", Path.rename
    target.mkdir()
    (target / "old").touch()

    def write():
        with resumable(target, "a") as finished:
            (finished.folder / "new").touch()
            finished.record("new", finished.folder / "new")

    def killed(path, to):
        if to == target:
            raise KeyboardInterrupt
        return original(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write()
    assert (tmp_path / ".x.replaced" / "old").exists()
    with contextlib.closing(Journal(tmp_path / ".x.partial", "a")) as kept:
        assert kept.holds("new", tmp_path / ".x.partial" / "new")
    write()
    assert [file.name for file in target.iterdir()] == ["new"]
    assert [place.name for place in tmp_path.iterdir()] == ["x"]


def test_a_conversion_into_its_native_source_goes_on(source, tmp_path):
    """What it has written so far is no part of the source."""
    opened = convert.open_checkpoint(native(source, tmp_path / "native"))
    before = fingerprint(opened)
    for ending in ("partial", "scratch", "replaced"):
        (opened.path / "a" / f".int8.{ending}" / "weights").mkdir(parents=True)
        (opened.path / "a" / f".int8.{ending}" / "weights" / "0").touch()
        assert fingerprint(opened) == before
    (opened.path / "a" / "other").touch()
    assert fingerprint(opened) != before


@pytest.mark.parametrize(
    "journal",
    [b"[]", b"\xff\xfe", b"3\n[]", b"[" * 100_000, *(b'{"fingerprint": "a"}\n' + part for part in PARTS)],
)
def test_a_damaged_journal_starts_over(journal, tmp_path):
    """Links in the folder go; what they lead to stays."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(journal)
    (folder / "link").symlink_to(elsewhere)
    for settings in ("a", "b"):
        with contextlib.closing(Journal(folder, settings)) as finished:
            assert not finished
            assert not finished.holds("part", folder / "part")
    assert [file.name for file in folder.iterdir()] == ["journal.jsonl"]
    assert elsewhere.is_dir()


def test_exported_tensors_are_those_of_the_source(source, tmp_path, monkeypatch):
    """Of the shards that were kept, too."""
    interrupted(monkeypatch, exported, source, tmp_path / "target", 200_000)
    exported(source, tmp_path / "target")
    merged = {}
    for file in (tmp_path / "target").glob("*.safetensors"):
        merged |= load_file(file)
    expected = load_file(source.path / "model.safetensors")
    assert merged.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(merged[name], array, err_msg=name)
