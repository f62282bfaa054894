"""The benchmark of loading runs, at a size at which its numbers say nothing, and cleans up."""

import re
import sys

import numpy as np
import pytest

from scripts import bench_load


@pytest.mark.parametrize("options", [[], ["--warm", "--tensor", "2", "--native"]])
def test_it_reads_loads_and_cleans_up(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_load, "_SHARD_BYTES", 5 << 20)
    arguments = ["--gigabytes", "0.01", "--turns", "1", "--folder", str(tmp_path), *options]
    monkeypatch.setattr(sys, "argv", ["bench_load.py", *arguments])
    bench_load.main()
    *converted, first, read, load, ratio, memory = capsys.readouterr().out.splitlines()
    assert len(converted) == ("--native" in options)
    gigabytes, files = re.match(r"(\S+) GB in (\d+) files", first).groups()
    assert 0.005 < float(gigabytes) < 0.02
    assert int(files) > 1
    assert read.startswith("read ")
    assert load.startswith("load ")
    assert re.fullmatch(r"load / read: \d+\.\d\d", ratio)
    assert re.fullmatch(r"host memory: \d+ MB at most above the \d+ MB before loading", memory)
    assert not list(tmp_path.iterdir())


def test_it_converts_once_and_tells_the_memory_of_that_process_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["bench_load.py", "--gigabytes", "0.01", "--folder", str(tmp_path), "--convert"])
    held = np.ones(2 << 30, np.uint8)  # by this process, which forks the one that converts
    bench_load.main()
    del held
    *_, last = capfd.readouterr().out.splitlines()
    most = re.fullmatch(r"0\.0\d+ GB in \d+ files, converted in \d+\.\d s; (\d+) MB at most", last).group(1)
    assert 100 < int(most) < 2000
    assert not list(tmp_path.iterdir())


def test_a_conversion_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_load, "write_checkpoint", lambda folder, nbytes: [])
    monkeypatch.setattr(sys, "argv", ["bench_load.py", "--folder", str(tmp_path), "--convert"])
    with pytest.raises(SystemExit, match=r"config\.json"):
        bench_load.main()
