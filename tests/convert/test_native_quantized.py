"""Quantized native checkpoints: bit-exact, restored on any mesh, refused where they do not fit."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import convert
from convert.__main__ import main
from jaxinfer.config import Quantization
from jaxinfer.parameters import declare, flatten, is_quantized, parts_of, to_physical
from pallas_kernels.formats import quantize
from tests import tiny
from tests.convert.meshed import abstract_tree, assert_same, load_flat

WIDE = {**tiny.CASES["llama"], "head_dim": 16, "intermediate_size": 256}
"""Groups of 32 divide the inputs of every projection, on two devices and four as well."""
FORMATS = [
    Quantization("int8"),
    Quantization("fp8"),
    Quantization("int4", 32),
    Quantization("int4", 32, symmetric=False),
]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Two kv heads, an odd vocabulary, a head of its own."""
    monkeypatch.setitem(tiny.CASES, "llama", WIDE)
    return convert.open_checkpoint(tiny.write_checkpoint("llama", tmp_path / "hf"))


def saved(source, folder, quantization, **options):
    return convert.open_checkpoint(
        convert.save_native(source, folder, quantization=quantization, progress=False, **options)
    )


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_stored_or_quantized_while_loading_the_same_bits_on_meshes_of_every_size(source, tmp_path, quantization):
    native = saved(source, tmp_path / "native", quantization)
    assert (native.format, native.dtype, native.config) == ("native", "float32", source.config)
    assert native.quantization == quantization
    plain = saved(source, tmp_path / "plain", None)
    for tensor in (1, 4):
        restored = load_flat(native, tensor, quantization=quantization)
        assert_same(restored, load_flat(source, tensor, quantization=quantization))
        assert_same(restored, load_flat(plain, tensor, quantization=quantization))


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_projections_are_quantized_as_the_canonical_arrays_are_and_the_rest_is_left_alone(
    source, tmp_path, quantization
):
    native = saved(source, tmp_path / "native", quantization)
    leaves = load_flat(native, quantization=quantization)
    options = {"group_size": quantization.group_size} if quantization.group_size else {}
    kept = set()
    for path, parameter in flatten(declare(source.config)):
        array = source.read(path, np.float32)
        if not is_quantized(leaves[path]):
            kept.add(path.rpartition(".")[2])
            np.testing.assert_array_equal(leaves[path], array)
            continue
        want = quantize(
            array,
            quantization.format,
            contract={"out": 3}.get(path.rpartition(".")[2], 1),
            symmetric=quantization.symmetric,
            **options,
        )
        assert parts_of(leaves[path]).keys() == parts_of(want).keys()
        for name, part in parts_of(want).items():
            np.testing.assert_array_equal(parts_of(leaves[path])[name], part, err_msg=f"{path}.{name}")
        assert parameter.contract
    assert kept == {"weight", "scale"}
    assert is_quantized(leaves["head.weight"]) == (quantization.format != "int4")
    assert not is_quantized(leaves["embed.weight"])


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_layouts_for_a_mesh_are_those_of_the_float_weight(source, quantization):
    """Replicated kv heads and a padded vocabulary: first laid out, or first quantized, is the same."""
    _, physical = abstract_tree(source.config, 8)
    for path, parameter in flatten(declare(source.config)):
        if not parameter.contract or (path == "head.weight" and quantization.format == "int4"):
            continue
        array = source.read(path, np.float32)
        options = {"group_size": quantization.group_size} if quantization.group_size else {}
        options |= {"contract": parameter.contract, "symmetric": quantization.symmetric}
        first = to_physical(path, quantize(array, quantization.format, **options), source.config, physical)
        last = quantize(to_physical(path, array, source.config, physical), quantization.format, **options)
        for name, part in parts_of(first).items():
            np.testing.assert_array_equal(part, parts_of(last)[name], err_msg=f"{path}.{name}")


def test_only_the_quantized_bytes_are_stored(source, tmp_path):
    native = saved(source, tmp_path / "native", Quantization("int8"))
    stored = {name: (info.shape, info.dtype) for name, info in native.tensors.items()}
    assert stored["layers.0.attention.qkv.values"] == ((2, 6, 16, 64), "int8")
    assert stored["layers.0.attention.qkv.scales"] == ((2, 6, 16), "float32")
    assert stored["layers.2.attention.out.values"] == ((64, 128), "int8")
    assert stored["layers.1.mlp.gate_up.values"] == ((2, 256, 64), "int8")
    assert stored["layers.1.mlp.down.values"] == ((64, 256), "int8")
    assert stored["head.weight.values"] == ((251, 64), "int8")
    assert stored["embed.weight"] == ((251, 64), "float32")
    size = sum(info.nbytes for info in native.tensors.values())
    on_disk = sum(file.stat().st_size for file in (tmp_path / "native" / "weights").rglob("*") if file.is_file())
    assert size < on_disk < 1.5 * size
    assert json.loads((tmp_path / "native" / "jaxinfer.json").read_text())["quantization"] == {
        "format": "int8",
        "group_size": None,
        "symmetric": True,
    }


def test_a_plain_checkpoint_is_still_of_the_version_that_older_readers_take(source, tmp_path):
    saved(source, tmp_path / "plain", None)
    saved(source, tmp_path / "quantized", Quantization("fp8"))
    versions = {
        name: json.loads((tmp_path / name / "jaxinfer.json").read_text())["format_version"]
        for name in ("plain", "quantized")
    }
    assert versions == {"plain": 1, "quantized": 2}


def test_scales_of_groups_follow_the_dtype_that_is_loaded(source, tmp_path):
    native = saved(source, tmp_path / "native", Quantization("int4", 64), dtype="bfloat16")
    for dtype in (ml_dtypes.bfloat16, np.float32):
        leaf = load_flat(native, dtype=dtype, quantization=native.quantization)["layers.0.mlp.down"]
        assert leaf.scales.dtype == dtype
        scales = leaf.scales.astype(np.float32)
        np.testing.assert_array_equal(scales, scales.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_native_checkpoint_can_be_quantized(source, tmp_path):
    plain = saved(source, tmp_path / "plain", None)
    first, second = (saved(s, tmp_path / s.format, Quantization("int8")) for s in (source, plain))
    assert_same(*(load_flat(native, quantization=Quantization("int8")) for native in (first, second)))


def test_what_is_quantized_is_not_quantized_again(source, tmp_path):
    native = saved(source, tmp_path / "native", Quantization("int8"))
    for quantization in (None, Quantization("int8"), Quantization("int4")):
        with pytest.raises(ValueError, match="native is quantized to int8 already; copy the folder"):
            convert.save_native(native, tmp_path / "again", quantization=quantization)
    for quantization in (None, Quantization("fp8")):
        with pytest.raises(
            ValueError, match="native is quantized to int8 already; load it as it is stored, or convert"
        ):
            load_flat(native, quantization=quantization)


@pytest.mark.parametrize(
    ("quantization", "fitting"),
    [(Quantization("int4", 128), "64, 32"), (Quantization("int4", 48), "64, 32")],
    ids=str,
)
def test_groups_that_do_not_divide_are_refused_with_those_that_do(source, tmp_path, quantization, fitting):
    message = (
        f"int4 in groups of {quantization.group_size} does not fit projections of 64, 128, 256 inputs; "
        f"group sizes that fit: {fitting}$"
    )
    with pytest.raises(ValueError, match=message):
        convert.save_native(source, tmp_path / "native", quantization=quantization)
    assert not (tmp_path / "native").exists()


def test_a_model_that_no_group_fits_is_told_so(tmp_path):
    source = convert.open_checkpoint(tiny.write_checkpoint("llama_biases", tmp_path / "hf"))
    message = "groups of any size does not fit projections of 64, 80, 96 inputs; group sizes that fit: none; use int8"
    with pytest.raises(ValueError, match=message):
        convert.save_native(source, tmp_path / "native", quantization=Quantization("int4"))


def test_values_beyond_float16_are_refused(tmp_path):
    tensors = tiny.weights("llama")
    tensors["model.norm.weight"][3] = 70_000.0
    tiny.write_config(tiny.CASES["llama"], tmp_path / "hf")
    tiny.write_safetensors(tensors, tmp_path / "hf")
    native = saved(convert.open_checkpoint(tmp_path / "hf"), tmp_path / "native", Quantization("int8"))
    with pytest.raises(ValueError, match=r"final_norm\.scale has values beyond float16's 65504; use bfloat16"):
        load_flat(native, dtype=np.float16, quantization=Quantization("int8"))


def test_one_parameter_at_a_time_is_whole_on_the_devices(source, monkeypatch):
    """While a projection is quantized the only float weights are those that stay so, and its own."""
    from convert import loading

    most, lay_out = [], loading.lay_out

    def measured(path, weight, config, physical, leaf):
        alive = sum(a.nbytes for a in jax.live_arrays() if a.dtype == np.float32 and a.ndim > 1) - before
        most.append(alive - weight.nbytes)
        return lay_out(path, weight, config, physical, leaf)

    monkeypatch.setattr(loading, "lay_out", measured)
    before = sum(a.nbytes for a in jax.live_arrays() if a.dtype == np.float32 and a.ndim > 1)
    leaves = load_flat(source, quantization=Quantization("int8"))
    scales = sum(leaf.scales.nbytes for leaf in leaves.values() if is_quantized(leaf))
    assert len(most) == 3 * 4 + 1
    assert max(most) <= leaves["embed.weight"].nbytes + scales


def test_command_line(source, tmp_path):
    target = tmp_path / "native"
    arguments = [str(source.path), str(target), "--dtype", "bfloat16", "--quantization", "int4", "--group-size", "32"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert f"{target}: llama, 3 layers, bfloat16 and int4, " in result.output
    assert convert.open_checkpoint(target).quantization == Quantization("int4", 32)
    result = CliRunner().invoke(main, [*arguments[:6], "--zero-points", "--force"])
    assert result.exit_code == 0, result.output
    assert convert.open_checkpoint(target).quantization == Quantization("int4", 64, symmetric=False)


@pytest.mark.parametrize(
    ("mesh", "options", "status", "message"),
    [
        ("tensor=3", [], 1, "tensor_parallel_size 3 does not fit 8 query heads"),
        ("tensor=4", ["--quantization", "int4", "--group-size", "64"], 1, "64 do not divide the 32 inputs of layers.0"),
        ("data=2", [], 2, "mesh axis 'data' has size 2; only 'tensor' may exceed 1 so far"),
        ("tensor:4", [], 2, "'tensor:4' is no mesh; give AXIS=SIZE, such as tensor=8, of data, pipe, expert, tensor"),
        ("depth=4", [], 2, "'depth=4' is no mesh"),
        ("tensor=0", [], 2, "mesh axis 'tensor' has size 0"),
        ("data=1,tensor=4", ["--quantization", "int8"], 0, "embed.weight"),
    ],
)
def test_a_mesh_that_could_not_load_it(source, tmp_path, mesh, options, status, message):
    arguments = [str(source.path), str(tmp_path / "native"), "--dry-run", "--mesh", mesh, *options]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == status, result.output
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("option", [["--group-size", "64"], ["--zero-points"]], ids=str)
def test_options_of_int4_alone(source, tmp_path, option):
    arguments = [str(source.path), str(tmp_path / "native"), "--quantization", "int8", *option]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "--group-size and --zero-points need --quantization int4" in result.output
