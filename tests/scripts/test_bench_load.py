"""The benchmark of loading runs, at a size at which its numbers say nothing, and cleans up."""

import re
import sys

import pytest

from scripts import bench_load


@pytest.mark.parametrize("options", [[], ["--warm", "--tensor", "2"]])
def test_it_reads_loads_and_cleans_up(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_load, "_SHARD_BYTES", 5 << 20)
    arguments = ["--gigabytes", "0.01", "--turns", "1", "--folder", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *arguments])
    bench_load.main()
    first, read, load, ratio = capsys.readouterr().out.splitlines()
    gigabytes, files = re.match(r"(\S+) GB in (\d+) files", first).groups()
    assert 0.005 < float(gigabytes) < 0.02
    assert int(files) > 1
    assert read.startswith("read ")
    assert load.startswith("load ")
    assert re.fullmatch(r"load / read: \d+\.\d\d", ratio)
    assert not list(tmp_path.iterdir())


def test_it_converts_once_and_tells_the_memory(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["bench_load.py", "--gigabytes", "0.01", "--folder", str(tmp_path), "--convert"])
    bench_load.main()
    *_, last = capfd.readouterr().out.splitlines()
    most = re.fullmatch(r"0\.0\d+ GB in \d+ files, converted in \d+\.\d s; (\d+) MB at most", last).group(1)
    assert 100 < int(most) < 2000
    assert not list(tmp_path.iterdir())
