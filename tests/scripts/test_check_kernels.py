"""scripts/check_kernels.py: every check can be built, compares like with like, and sees what is wrong."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts import check_kernels
from scripts.kernel_checks import Check, checks, decode

CHECKS = checks()


def test_names():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    ops = {name.split()[0] for name in names}
    assert ops == {
        "paged_decode", "paged_prefill", "cache_append", "quant_matmul", "fused_mlp", "moe", "rms_norm",
        "quantize_rows", "norm_matmul",
    }  # fmt: skip


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if "paged" not in c.name or " d=128 " in c.name], ids=lambda check: check.name
)
def test_traces(check):
    """Kernel and reference return the same structure and shapes; the kernel takes the case. Nothing runs."""
    inputs = jax.eval_shape(check.inputs, jax.random.key(0))
    assert jax.eval_shape(functools.partial(check_kernels.error, check), *inputs).shape == ()


def test_unused_slots_of_the_cache_are_nan():
    _q, pages, tables, lengths, _ = decode(window=100, queries=2).inputs(jax.random.key(0))
    for row, length in enumerate(np.asarray(lengths)):
        keys = np.asarray(pages.k[tables[row]].astype(jnp.float32))[:, 0, :, 0].reshape(-1)
        live = np.isfinite(keys)
        assert live[: max(0, length - 101)].sum() == 0
        assert live[max(0, length - 101) : length].all()
        if length == 0:
            assert not live.any()


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.01, 1), (np.nan, 1)])
def test_exit_status(factor, status, monkeypatch):
    check = Check("norm", lambda key: (jax.random.normal(key, (3, 8)),), lambda x: x * factor, lambda x: x, 5e-3)
    monkeypatch.setattr(check_kernels, "checks", lambda: [check])
    with pytest.raises(SystemExit) as stop:
        check_kernels.main([])
    assert stop.value.code == status


def test_what_fails_is_wrong_and_does_not_stop_the_others(monkeypatch, capsys):
    check = Check("right", lambda key: (jax.random.normal(key, (3, 8)),), lambda x: x, lambda x: x, 5e-3)
    failing = dataclasses.replace(check, name="failing", kernel=lambda x: x.reshape(7))
    monkeypatch.setattr(check_kernels, "checks", lambda: [failing, check])
    with pytest.raises(SystemExit) as stop:
        check_kernels.main(["--processes", "1"])
    assert stop.value.code == 1
    failed, right = capsys.readouterr().out.splitlines()
    assert "TypeError" in failed
    assert right.endswith("ok")


def test_processes_share_the_checks(capfd):
    """Here every kernel fails: each check is reported once, by one of the processes."""
    with pytest.raises(SystemExit) as stop:
        check_kernels.main(["--only", "rms_norm", "--processes", "2"])
    assert stop.value.code == 1
    out = capfd.readouterr().out
    names = [check.name for check in CHECKS if check.name.startswith("rms_norm")]
    assert [out.count(name) for name in names] == [1] * len(names)
    assert f"{len(names)} checks" in out
