"""Compiling for GPUs that are not there."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from scripts import aot

VECTOR = jax.ShapeDtypeStruct((128,), jnp.float32)


def double(x):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2.0

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def crowded(x):
    """Holds all of x in the registers of 128 threads until their sum is there."""

    def body(x_ref, out_ref):
        values = x_ref[...]
        out_ref[...] = values * values.sum()

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_mosaic_kernel_compiles(gpu):
    compiled, kernels = aot.compile_for_gpu(double, VECTOR, gpu=gpu)
    assert "mosaic_gpu" in compiled.as_text()
    (kernel,) = kernels
    assert 4 <= kernel.registers <= 32
    assert kernel.spilled_bytes == 0


def test_two_kernels_of_a_program_are_both_seen():
    _, kernels = aot.compile_for_gpu(lambda x: (double(x), crowded(x)), VECTOR)
    assert len(kernels) == 2


def test_spills_are_seen():
    """A thread has 255 registers at most; this one needs 320 for the values alone."""
    _, (kernel,) = aot.compile_for_gpu(crowded, jax.ShapeDtypeStruct((320 * 128,), jnp.float32))
    assert kernel.registers == 255
    assert kernel.spilled_bytes > 4 * (320 - 255)


PRODUCT = "{ .reg .pred p; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2}, %rd1, %rd2, p, 1, 1; }"
OTHER = PRODUCT.replace("%f1,%f2", "%f3,%f4")
COMMIT, ALL, ALL_BUT_ONE = "wgmma.commit_group.sync.aligned;", *(f"wgmma.wait_group.sync.aligned {n};" for n in (0, 1))


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ([PRODUCT, COMMIT, ALL, "add.f32 %f5, %f1, %f2;"], []),
        ([PRODUCT, COMMIT, "add.f32 %f5, %f6, %f2;", ALL], ["add.f32 %f5, %f6, %f2;"]),
        ([PRODUCT, "st.global.f32 [%rd4], %f1;", COMMIT, ALL], ["st.global.f32 [%rd4], %f1;"]),
        ([PRODUCT, COMMIT, PRODUCT, "add.s64 %rd1, %rd1, 2;", COMMIT, ALL], []),
        ([PRODUCT, COMMIT, OTHER, COMMIT, ALL_BUT_ONE, "mul.f32 %f5, %f1, %f1;", ALL], []),
        ([PRODUCT, COMMIT, OTHER, COMMIT, ALL_BUT_ONE, "mul.f32 %f5, %f3, %f1;"], ["mul.f32 %f5, %f3, %f1;"]),
    ],
)
def test_sums_that_are_read_too_early_are_seen(lines, early):
    assert aot.early_reads("\n".join(lines)) == early


def test_a_kernel_that_reads_them_too_early_is_refused(monkeypatch):
    monkeypatch.setattr(aot, "early_reads", lambda ptx: ["add"] if ".visible" in ptx else [])
    with pytest.raises(RuntimeError, match=r"reads sums that the matrix units have not written yet: add"):
        aot.compile_for_gpu(double, VECTOR)


def test_donated_arguments_are_aliased():
    compiled, kernels = aot.compile_for_gpu(lambda x, y: (x + y, y), VECTOR, VECTOR, donate_argnums=(0,))
    assert compiled.memory_analysis().alias_size_in_bytes == 512
    assert kernels == []


def test_the_environment_is_as_before():
    names = ("PATH", "MOSAIC_GPU_DUMP_TO")
    before = {name: os.environ.get(name) for name in names}
    folders = []

    def fail():
        with aot.mosaic_dump() as folder:
            folders.append(folder)
            assert os.environ["MOSAIC_GPU_DUMP_TO"] == str(folder)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert {name: os.environ.get(name) for name in names} == before
    assert not folders[0].exists()


def test_several_gpus():
    """A sum over a sharded dimension is an all-reduce over all of them."""
    mesh = aot.gpu_mesh("h200", 4)
    assert mesh.shape == {"tensor": 4}
    assert aot.gpu_mesh("h100", 2, ("data", "tensor")).shape == {"data": 2, "tensor": 1}
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "tensor")))
    total = jax.jit(lambda x: x.sum(1), out_shardings=NamedSharding(mesh, PartitionSpec()))
    text = total.lower(x).compile().as_text()
    assert "all-reduce" in text
    assert "f32[8,256]" in text


PTXAS = """\
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 16 bytes cumulative stack size
"""


def test_parse_ptxas():
    text = PTXAS.format(stores=12, loads=20, registers=168)
    assert aot.parse_ptxas(text) == aot.Kernel(registers=168, spilled_bytes=32)


@pytest.mark.parametrize("text", ["", "Used 12 registers", PTXAS.format(stores=1, loads=1, registers="no")])
def test_what_cannot_be_read_is_an_error(text):
    """Silence would pass for zero spills."""
    with pytest.raises(RuntimeError, match="cannot read what ptxas printed"):
        aot.parse_ptxas(text)


def test_without_nvcc(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'jaxinfer\[aot\]'"):
        aot.compile_for_gpu(double, VECTOR)


def test_without_the_plugin(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", missing)
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cpu"):
        aot.gpu_mesh()


@pytest.fixture
def cache(tmp_path):
    """A persistent cache of this test's own, that keeps everything."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path / "cache"), 0.0)):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "cache"
    for name, value in zip(names, before):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_persistent_cache_is_left_alone(cache):
    """JAX cannot read such a program back; and one from a cache would tell nothing of its registers."""
    aot.compile_for_gpu(double, VECTOR)
    assert not list(cache.glob("*"))
    jax.jit(lambda x: x + 1.0).lower(VECTOR).compile()
    assert list(cache.glob("*")), "other programs are kept"


@pytest.mark.usefixtures("cache")  # an empty one: JAX cannot save a CPU program that it read from a cache
def test_save_and_load(tmp_path):
    """On the CPU, where a program for it can be loaded as one for a GPU can on that GPU."""

    def add(pair, *, by=1.0):
        return {"sum": pair[0] + pair[1] * by}

    compiled = jax.jit(add).lower((VECTOR, VECTOR)).compile()
    aot.save(compiled, tmp_path / "add.bin")
    x = np.arange(128, dtype=np.float32)
    np.testing.assert_array_equal(aot.load(tmp_path / "add.bin")((x, 2 * x))["sum"], 3 * x)


def test_a_gpu_program_is_saved_with_its_kernel(tmp_path):
    compiled, _ = aot.compile_for_gpu(double, VECTOR)
    aot.save(compiled, tmp_path / "double.bin")
    stored = (tmp_path / "double.bin").read_bytes()
    assert b"\x7fELF" in stored, "machine code"
    assert b"mosaic_gpu" in stored
    with pytest.raises(jax.errors.JaxRuntimeError):
        aot.load(tmp_path / "double.bin")  # on a CPU
