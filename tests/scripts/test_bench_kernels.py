"""The kernel benchmark on CPU: small cases, a timer that counts calls instead of microseconds."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from scripts import bench_kernels
from scripts.kernels import measure, stages
from scripts.kernels.common import Case, Program

CEILINGS = measure.Ceilings(read=1e9, matmul=1e12)


def inputs(key):
    x, w = jax.random.split(key)
    return jax.random.normal(x, (4, 32)), {"w": jax.random.normal(w, (32, 16))}


def product(x, weight):
    return x @ weight["w"]


def wrong(x, weight):
    return product(x, weight).at[2].multiply(1.1)


CASE = Case(
    name="f32 4x32x16",
    op="product",
    inputs=inputs,
    programs={
        "ours": Program(product),
        "transposed": Program(
            lambda x, w: (w @ x.T,), prepare=lambda x, weight: (x, weight["w"].T), result=lambda out: out[0].T
        ),
    },
    reference=lambda x, weight: jnp.einsum("ti,io->to", x, weight["w"]),
    tolerance=1e-5,
    bytes=1000,
    flops=1_000_000,
)


def with_programs(**programs):
    return dataclasses.replace(CASE, programs=programs)


def timer(call, repeats):
    """Two kernels of a microsecond for each value seen in what 8 calls return."""
    outputs = [call(i) for i in range(8)]
    assert all(leaf.shape for leaf in jax.tree.leaves(outputs))
    return [1.0, 1.0]


def measured(case, timer=timer):
    return measure.measure(case, stages.compile_here([case], None, "h200"), timer)


def test_right_programs_are_timed():
    result = measured(CASE)
    assert result.right
    assert [timing.us for timing in result.timings.values()] == [2.0, 2.0]
    assert result.bytes_per_second == 5e8
    assert result.flops_per_second == 5e11


def test_a_wrong_program_is_not_timed_and_fails_the_run():
    result = measured(with_programs(ours=Program(wrong), rival=Program(product)))
    ours, rival = result.timings.values()
    assert ours.error == pytest.approx(0.1, rel=1e-3), "one row of four is 10 % off"
    assert "wrong" in ours.failure
    assert math.isnan(ours.us)
    assert rival.us == 2.0
    assert not result.right


def test_nan_is_wrong():
    result = measured(with_programs(ours=Program(lambda x, w: product(x, w).at[0, 0].set(jnp.nan))))
    assert math.isnan(result.ours.error)
    assert not result.right
    assert not result.ours.kernels


def test_nan_is_wrong_where_zero_is_expected():
    assert jnp.isnan(stages.row_error(jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3))))
    assert stages.row_error(jnp.ones((2, 3)), jnp.zeros((2, 3))) == jnp.inf
    assert stages.row_error(jnp.zeros((2, 3)), jnp.zeros((2, 3))) == 0.0


@pytest.mark.parametrize("computed", [jnp.ones((2, 4)), (jnp.ones((2, 3)),)], ids=["shape", "structure"])
def test_what_differs_in_shape_is_refused(computed):
    with pytest.raises(ValueError, match="the program returns"):
        stages.row_error(computed, jnp.ones((2, 3)))


def test_one_row_of_many_counts():
    """A long sequence's small outputs are not hidden by a short one's large ones."""
    expected = jnp.array([[100.0, 100.0], [0.01, 0.01]])
    assert stages.row_error(expected.at[1].multiply(1.5), expected) == pytest.approx(0.5)


def test_a_program_that_raises_does_not_stop_the_others():
    def broken(x, weight):
        raise NotImplementedError("no such kernel\nhere")

    result = measured(with_programs(ours=Program(product), rival=Program(broken, autotuned=True)))
    assert result.ours.us == 2.0
    assert result.timings["rival"].failure == "NotImplementedError: no such kernel"
    assert not result.right


def test_a_broken_reference_fails_every_program():
    result = measured(dataclasses.replace(CASE, reference=lambda x, weight: x @ x))
    assert all("Error" in timing.failure for timing in result.timings.values())
    assert not result.right


def test_inputs_rotate_over_disjoint_data():
    case = dataclasses.replace(CASE, programs={"ours": Program(product)}, bytes=measure.L2_BYTES)
    seen = []

    def collect(call, repeats):
        seen.extend(float(call(i)[0, 0]) for i in range(7))
        return [1.0]

    measured(case, collect)
    assert measure.turns(case) == 3
    assert len(set(seen)) == 3
    assert seen[:3] == seen[3:6]


@pytest.mark.parametrize(("size", "turns"), [(1, 8), (measure.L2_BYTES // 2, 5), (1 << 40, 2)])
def test_turns_flush_the_cache(size, turns):
    assert measure.turns(dataclasses.replace(CASE, bytes=size)) == turns


def test_in_place_arguments_are_passed_on():
    def add(step, pool):
        return step, pool + 1.0

    case = dataclasses.replace(
        CASE,
        inputs=lambda key: (jnp.zeros(3), jnp.zeros((2, 4))),
        programs={"ours": Program(add, in_place={1: 1}), "rival": Program(add)},
        reference=lambda step, pool: (step, pool + 1.0),
        bytes=1 << 40,
    )
    pools = []

    def collect(call, repeats):
        pools.append([float(call(i)[1][0, 0]) for i in range(4)])
        return [1.0]

    compiled = stages.compile_here([case], None, "h200")
    assert compiled[case.full_name, "ours"].memory_analysis().alias_size_in_bytes == 32, "the pool is donated"
    assert measure.measure(case, compiled, collect).right
    assert pools == [[1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]], "two turns each"


def test_targets():
    case = dataclasses.replace(CASE, min_share=0.5, min_tflops=0.6, max_ratio=("transposed", 1.0))
    result = measured(case)
    assert result.targets(CEILINGS) == [
        ("share ≥ 50%", True),
        ("≥ 0.6 TFLOP/s", False),
        ("time ≤ 1 of transposed", True),
    ]
    assert measured(dataclasses.replace(case, max_ratio=("transposed", 0.99))).targets(CEILINGS)[2][1] is False


def test_what_was_not_timed_misses_its_targets():
    case = dataclasses.replace(with_programs(ours=Program(wrong)), min_share=0.0, min_tflops=0.0)
    assert [met for _, met in measured(case).targets(CEILINGS)] == [False, False]


@pytest.fixture
def bench(monkeypatch):
    """The script with one op of two cases, the timer and ceilings above."""
    slow = dataclasses.replace(CASE, name="slow", min_share=0.9, max_ratio=("transposed", 1.5))
    module = types.ModuleType("scripts.kernels.product")
    module.cases = lambda: [CASE, slow]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(bench_kernels.pkgutil, "iter_modules", lambda path: [types.SimpleNamespace(name="product")])
    monkeypatch.setattr(bench_kernels.device_time, "kernel_times", timer)
    monkeypatch.setattr(bench_kernels, "measured_ceilings", lambda: CEILINGS)
    return module


def run(*arguments):
    with pytest.raises(SystemExit) as exit_:
        bench_kernels.main(arguments)
    return exit_.value.code


def test_table_json_and_plot(bench, tmp_path, capsys):
    files = tmp_path / "results.json", tmp_path / "roofline.png"
    assert run("--json", str(files[0]), "--plot", str(files[1])) == 0, "a missed target is no failure"
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("product slow")]
    assert row.split()[2:6] == ["2.0", "0", "50.0%", "0.5"], "us, GB/s, share, TFLOP/s"
    assert row.endswith("share ≥ 90%: MISSED; time ≤ 1.5 of transposed: met; transposed 1.00x")
    report = json.loads(files[0].read_text())
    assert report["read_ceiling"] == 1e9
    assert [case["name"] for case in report["cases"]] == ["product f32 4x32x16", "product slow"]
    assert report["cases"][1]["programs"]["ours"]["kernels_us"] == [1.0, 1.0]
    assert report["cases"][1]["targets"][0] == {"target": "share ≥ 90%", "met": False}
    assert files[1].read_bytes()[:4] == b"\x89PNG"


def test_a_wrong_case_gives_status_1_and_null_in_json(bench, tmp_path, capsys):
    bench.cases = lambda: [with_programs(ours=Program(wrong)), dataclasses.replace(CASE, name="right")]
    assert run("--json", str(tmp_path / "results.json"), "--plot", str(tmp_path / "plot.png")) == 1
    assert "ours FAILED: wrong: its error is 1.0e-01, the tolerance 1.0e-05" in capsys.readouterr().out
    wrong_case, right_case = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert wrong_case["programs"]["ours"]["us"] is None
    assert right_case["programs"]["ours"]["us"] == 2.0


def test_only_and_list(bench, capsys):
    bench_kernels.main(["--list", "--only", "slow|fast"])
    assert capsys.readouterr().out == "product slow\n"
    assert run("--only", "missing") == 2


def test_no_rivals_keeps_those_of_targets(bench, capsys):
    assert run("--no-rivals") == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("product")]
    assert "transposed" not in first
    assert "transposed" in second


def test_names_are_unique(bench):
    bench.cases = lambda: [CASE, CASE]
    with pytest.raises(ValueError, match=r"share a name: \['product f32 4x32x16'\]"):
        bench_kernels.all_cases()


def test_compiled_ahead_for_a_gpu(bench, tmp_path, capsys):
    """The files are those that a run looks for, and are refused once the sources have changed."""
    folder = tmp_path / "executables"
    bench.cases = lambda: [with_programs(ours=Program(product), rival=Program(product, autotuned=True))]
    bench_kernels.main(["--compile-only", "--executables", str(folder), "--gpu", "h100"])
    assert {path.name for path in folder.glob("*.bin")} == {
        stage.file_name for stage in stages.stages(bench.cases()[0]) if stage.ahead
    }
    assert "product f32 4x32x16: inputs\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="not of these sources for this GPU"):
        run("--executables", str(folder))
    with pytest.raises(ValueError, match="name an empty folder"):
        bench_kernels.main(["--compile-only", "--executables", str(folder)])


@pytest.fixture
def uncached():
    """JAX cannot save a CPU program that it read from its cache."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("uncached")
def test_saved_executables_are_loaded(tmp_path, monkeypatch):
    """On CPU, for want of a GPU: a run takes what is in the folder, and compiles the rest."""
    case = with_programs(ours=Program(product))
    (tmp_path / stages.MANIFEST).write_text(json.dumps(stages._origin("h200")))
    saved = [stage for stage in stages.stages(case) if stage.name != "reference"]
    for stage in saved:
        stages.aot.save(stage.compile(), tmp_path / stage.file_name)
    compiled = []
    monkeypatch.setattr(
        stages.Stage,
        "compile",
        lambda stage, compile=stages.Stage.compile: (compiled.append(stage.name), compile(stage))[1],
    )
    programs = stages.compile_here([case], tmp_path, "h200")
    assert compiled == ["reference"]
    assert measure.measure(case, programs, timer).right


def test_the_cases_of_the_kernels_are_well_formed():
    for case in bench_kernels.all_cases():
        rivals = list(case.programs)[1:]
        assert case.bytes > 0, case.full_name
        assert case.flops > 0, case.full_name
        assert case.max_ratio is None or case.max_ratio[0] in rivals, case.full_name


def test_the_script_runs_as_shown(tmp_path):
    """From anywhere, as a file."""
    done = subprocess.run(
        [sys.executable, bench_kernels.__file__, "--only", "no such case"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "no case has a name like 'no such case'; --list shows them" in done.stderr
