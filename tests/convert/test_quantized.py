"""Checkpoints that others quantized: every weight is what its format says, and what does not fit is refused."""

import functools
import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import convert
from convert.quantized import dequantized
from convert.quantized.layer import GROUP_SIZES
from convert.tensors import FILE_DTYPES, TensorInfo, whole
from jaxinfer.config import Quantization
from jaxinfer.parameters import declare, flatten, is_quantized
from pallas_kernels import formats
from pallas_kernels.formats import dequantize
from tests import tiny
from tests.convert import quantized_files as files
from tests.convert.meshed import assert_same, load_flat

KINDS = {dtype: name for name, dtype in FILE_DTYPES.items()}
FILES = Path(__file__).parent / "files"
GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": False, "damp_percent": 0.01}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "uint8"}


def compressed(format, **weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def partial(maker, **options):
    return functools.partial(maker, **options)


INT8 = compressed("int-quantized", num_bits=8, strategy="channel")
INT8_TENSOR = compressed("int-quantized", num_bits=8, strategy="tensor")
INT8_GROUPS = compressed("int-quantized", num_bits=8, strategy="group", group_size=32)
FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
FP8_TENSOR = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
BLOCKS = compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[48, 40])
INT4 = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
ORDERED = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group")
SYMMETRIC = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=True)
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40], "activation_scheme": "dynamic"}
CASES = {
    **{f"gptq{bits}": ({**GPTQ, "bits": bits}, partial(files.gptq, bits=bits)) for bits in (2, 3, 4, 8)},
    "gptq8_outputs": (
        {**GPTQ, "bits": 8, "sym": True, "group_size": -1},
        lambda outputs, inputs, rng: files.gptq(outputs, inputs, rng, bits=8, symmetric=True, group=inputs),
    ),
    "gptq4_symmetric": ({**GPTQ, "bits": 4, "sym": True}, partial(files.gptq, symmetric=True)),
    "gptq4_act_order": ({**GPTQ, "bits": 4}, partial(files.gptq, act_order=True)),
    "gptq3_v2": ({**GPTQ, "bits": 3, "checkpoint_format": "gptq_v2"}, partial(files.gptq, bits=3, version=2)),
    "awq": (AWQ, files.awq),
    "awq_without_zeros": ({**AWQ, "zero_point": False, "version": "GEMM"}, partial(files.awq, zeros=False)),
    "awq_gemv": ({**AWQ, "version": "gemv"}, files.awq_gemv),
    "int4": (INT4, files.compressed_packed),
    "int4_zeros": (INT4, partial(files.compressed_packed, zeros=True)),
    "int4_zeros_act_order": (INT4, partial(files.compressed_packed, zeros=True, act_order=True)),
    "int8_packed": (
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        lambda outputs, inputs, rng: files.compressed_packed(outputs, inputs, rng, bits=8, group=inputs),
    ),
    "int8_packed_zeros": (
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        lambda outputs, inputs, rng: files.compressed_packed(outputs, inputs, rng, bits=8, zeros=True, group=inputs),
    ),
    "int8": (INT8, files.compressed_int8),
    "int8_zeros": (INT8, partial(files.compressed_int8, zeros=True)),
    "int8_tensor": (INT8_TENSOR, partial(files.compressed_int8, each="tensor")),
    "int8_groups": (INT8_GROUPS, partial(files.compressed_int8, each="group")),
    "int8_groups_zeros": (INT8_GROUPS, partial(files.compressed_int8, each="group", zeros=True)),
    "fp8": (FP8, files.fp8),
    "fp8_tensor": (FP8_TENSOR, partial(files.fp8, each="tensor")),
    "fp8_blocks": (BLOCKS, partial(files.fp8, each="block")),
    "deepseek": (DEEPSEEK, partial(files.fp8, each="block", suffix="_scale_inv")),
    "deepseek_e8m0": (
        DEEPSEEK,
        partial(files.fp8, each="block", suffix="_scale_inv", scale_dtype=ml_dtypes.float8_e8m0fnu),
    ),
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "static"}, partial(files.fp8, each="tensor")),
    "nf4": (BNB, files.bnb4),
    "nf4_nested": (BNB, partial(files.bnb4, nested=True)),
    "bnb8": (BNB, files.bnb8),
}


def write(folder, config, maker, *, extra=None):
    """A llama whose projections are quantized; returns what its weights mean."""
    rng, stored, meant = np.random.default_rng(0), {}, {}
    for name, array in tiny.weights("llama").items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = array.astype(np.float16)
            continue
        parts, meant[name] = maker(*array.shape, rng)
        stored |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
    tiny.write_config({**tiny.CASES["llama"], "torch_dtype": "float16", "quantization_config": config}, folder)
    tiny.write_safetensors(stored | (extra or {}), folder)
    return meant


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_the_format_says(name, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 5000)
    config, maker = CASES[name]
    meant = write(tmp_path / "quantized", config, maker)
    tiny.write_config(tiny.CASES["llama"], tmp_path / "floats")
    tiny.write_safetensors(meant, tmp_path / "floats")
    with caplog.at_level(logging.WARNING):
        checkpoint = convert.open_checkpoint(tmp_path / "quantized")
    assert checkpoint.dtype == "float16"
    kept = f"kept in {KEPT[name].format}" if name in KEPT else "read as floats"
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [f"the projections are {kept}"]
    assert checkpoint.quantization == KEPT.get(name)
    assert_same(load_flat(checkpoint), load_flat(convert.open_checkpoint(tmp_path / "floats")))


INT8S = ("int8", "int8_tensor", "bnb8")
KEPT = {
    **{"gptq4": Quantization("int4", 32, symmetric=False), "gptq4_symmetric": Quantization("int4", 32)},
    **{"awq_gemv": Quantization("int4", 32, symmetric=False)},
    **{"awq": Quantization("int4", 32, symmetric=False), "awq_without_zeros": Quantization("int4", 32)},
    **{"int4": Quantization("int4", 32), "int4_zeros": Quantization("int4", 32, symmetric=False)},
    **{name: Quantization("int8", head=False) for name in ("gptq8_outputs", "int8_packed", *INT8S)},
    **{name: Quantization("fp8", head=False) for name in ("fp8", "fp8_tensor", "autofp8")},
}
"""The others are no format of ours: other bits, groups or zero points, or inputs in another order."""


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_a_format_of_ours_is_kept_as_it_is(name, tensor, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.checkpoint._BLOCK_BYTES", 5000)
    write(tmp_path, *CASES[name])
    checkpoint = convert.open_checkpoint(tmp_path)
    kept, floats = load_flat(checkpoint, tensor, quantization=checkpoint.quantization), load_flat(checkpoint, tensor)
    contracted = {path: parameter.contract for path, parameter in flatten(declare(checkpoint.config))}
    for path, weight in kept.items():
        meant = np.asarray(floats[path])
        if is_quantized(weight):
            assert "head" not in path
            outputs = meant.shape[contracted[path] :]
            meant = np.moveaxis(meant.reshape(-1, *outputs), 0, -1)
            weight = dequantize(weight, np.float32)
        np.testing.assert_array_equal(np.asarray(weight), meant, err_msg=path)
    assert sum(map(is_quantized, kept.values())) == 4 * checkpoint.config.num_layers


@pytest.mark.parametrize("name", ["gptq4", "int8", "fp8"])
def test_it_is_written_as_it_is(name, tmp_path):
    write(tmp_path / "hf", *CASES[name])
    source = convert.open_checkpoint(tmp_path / "hf")
    native = convert.open_checkpoint(convert.save_native(source, tmp_path / "native", progress=False))
    assert native.quantization == source.quantization == KEPT[name]
    assert_same(*(load_flat(c, 2, quantization=KEPT[name]) for c in (native, source)))
    with pytest.raises(ValueError, match="already; convert it without another quantization"):
        convert.save_native(source, tmp_path / "x", quantization=Quantization("int8"))


def test_a_quantized_head_is_kept_too(tmp_path):
    rng, tensors = np.random.default_rng(0), {}
    for name, array in tiny.weights("llama").items():
        quantized = name.endswith("_proj.weight") or name == "lm_head.weight"
        parts, _ = files.compressed_int8(*array.shape, rng) if quantized else ({".weight": array}, None)
        tensors |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
    tiny.write_config({**tiny.CASES["llama"], "quantization_config": INT8}, tmp_path)
    tiny.write_safetensors(tensors, tmp_path)
    checkpoint = convert.open_checkpoint(tmp_path)
    assert checkpoint.quantization == Quantization("int8")
    head = load_flat(checkpoint, quantization=checkpoint.quantization)["head.weight"]
    np.testing.assert_array_equal(np.asarray(head.values), tensors["lm_head.weight"])


def test_one_projection_of_another_kind_makes_them_all_floats(tmp_path):
    rng, tensors = np.random.default_rng(0), {}
    for name, array in tiny.weights("llama").items():
        quantized = name.endswith("_proj.weight") and name != "model.layers.2.mlp.down_proj.weight"
        parts = files.compressed_int8(*array.shape, rng)[0] if quantized else {".weight": array}
        tensors |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
    tiny.write_config({**tiny.CASES["llama"], "quantization_config": INT8}, tmp_path)
    tiny.write_safetensors(tensors, tmp_path)
    assert convert.open_checkpoint(tmp_path).quantization is None


def test_symmetric_weights_among_others_keep_zero_points(tmp_path):
    def maker(outputs, inputs, rng):
        return files.gptq(outputs, inputs, rng, symmetric=inputs == 96)

    meant = write(tmp_path, {**GPTQ, "bits": 4}, maker)
    checkpoint = convert.open_checkpoint(tmp_path)
    assert checkpoint.quantization == Quantization("int4", 32, symmetric=False)
    down = load_flat(checkpoint, quantization=checkpoint.quantization)["layers.2.mlp.down"]
    assert not np.asarray(down.zeros).any()
    np.testing.assert_array_equal(dequantize(down, np.float32), meant["model.layers.2.mlp.down_proj.weight"])


def test_group_sizes_are_those_of_the_formats():
    assert GROUP_SIZES == formats.GROUP_SIZES


class Memory:
    """A reader of arrays."""

    def __init__(self, arrays):
        self._arrays = arrays
        self.tensors = {n: TensorInfo(a.shape, KINDS[a.dtype], a.nbytes) for n, a in arrays.items()}

    def read(self, name, start, stop):
        return self._arrays[name][start:stop] if self._arrays[name].ndim else self._arrays[name]


@pytest.mark.parametrize(
    ("name", "config"),
    [("awq", AWQ), ("bitsandbytes", BNB), ("compressed_tensors", INT4 | {"config_groups": {}})],
)
def test_files_of_the_libraries_themselves(name, config):
    """Made, and dequantized as `expected`, by bitsandbytes 0.50.2 and compressed-tensors 0.20.1 (the AWQ file by its
    converter). int8 is multiplied in another order there."""
    with safe_open(FILES / f"{name}.safetensors", "np") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if name == "compressed_tensors":
        schemes = {str(bits): {"weights": {"num_bits": bits}} for bits in (4, 8)}
        config = {**config, "config_groups": schemes}
    expected = {key.removesuffix("expected"): array for key, array in arrays.items() if key.endswith("expected")}
    reader = dequantized(Memory({k: a for k, a in arrays.items() if not k.endswith("expected")}), config, "config.json")
    assert len(reader.tensors) == len(expected)
    for prefix, array in expected.items():
        weight = f"{prefix or 'x.'}weight"
        tolerance = 1e-6 if prefix == "int8." else 0
        np.testing.assert_allclose(whole(reader, weight), array, rtol=tolerance, atol=0, err_msg=weight)
        np.testing.assert_array_equal(reader.read(weight, 1, 4), whole(reader, weight)[1:4])


def of_one(config, parts):
    """The weight x as `config` has it read."""
    reader = dequantized(Memory({f"x{name}": array for name, array in parts.items()}), config, "config.json")
    return whole(reader, "x.weight")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_zero_borrow_from_their_neighbours(bits):
    """Version 1 subtracts 1 in every place of a word at once."""
    parts, meant = files.gptq(48, 64, np.random.default_rng(0), bits=bits, version=2, least=0)
    words = parts[".qzeros"].view(np.uint32)
    assert (words & np.uint32(2**bits - 1) == 0).any()
    parts[".qzeros"] = (words - np.uint32((2**32 - 1) // (2**bits - 1))).view(np.int32)
    np.testing.assert_array_equal(of_one({**GPTQ, "bits": bits}, parts), meant)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
def test_symmetric_zero_points_are_the_middle_whatever_the_version(bits, version, said):
    parts, meant = files.gptq(32, 64, np.random.default_rng(0), bits=bits, version=version, symmetric=True)
    np.testing.assert_array_equal(of_one({**GPTQ, "sym": True, "bits": bits, "checkpoint_format": said}, parts), meant)


def test_symmetric_zero_points_of_three_bits_are_not_asked_for():
    parts, meant = files.gptq(32, 64, np.random.default_rng(0), bits=3, symmetric=True)
    parts[".qzeros"] ^= 0x05000000
    np.testing.assert_array_equal(of_one({**GPTQ, "sym": True, "bits": 3}, parts), meant)


@pytest.mark.parametrize(
    "own",
    [
        {"format": "gptq_v2"},
        {"format": "gptq_v2", "checkpoint_format": None, "adapter": None, "rotation": None},
        {"checkpoint_format": "gptq_v2", "group_size": None, "dynamic": {"-:lm_head": {}, "+:x": {}}},
    ],
)
def test_one_setting_is_said_in_several_ways(own):
    parts, meant = files.gptq(32, 64, np.random.default_rng(0), version=2)
    np.testing.assert_array_equal(of_one({**GPTQ, "bits": 4, **own}, parts), meant)


def test_rows_that_start_within_a_byte():
    parts, meant = files.bnb4(4, 7, np.random.default_rng(0), block=8)
    reader = dequantized(Memory({f"x{name}": array for name, array in parts.items()}), BNB, "config.json")
    for start, stop in ((0, 4), (1, 2), (1, 4), (3, 4)):
        np.testing.assert_array_equal(reader.read("x.weight", start, stop), meant[start:stop])


def test_mxfp4():
    parts, meant = files.mxfp4(3, 6, 64, np.random.default_rng(0))
    arrays = {f"experts.gate_up_proj{name}": array for name, array in parts.items()}
    reader = dequantized(Memory(arrays), {"quant_method": "mxfp4", "modules_to_not_convert": []}, "config.json")
    ((name, info),) = reader.tensors.items()
    assert (name, info.shape) == ("experts.gate_up_proj", (3, 64, 6))
    assert info.nbytes == 3 * 6 * (32 + 2)
    np.testing.assert_array_equal(whole(reader, name), meant)
    np.testing.assert_array_equal(reader.read(name, 1, 2), meant[1:2])
    arrays["experts.gate_up_proj_scales"][1, 2, 1] = 255
    nan = np.isnan(whole(reader, name))
    assert nan[1, 32:, 2].all()
    assert nan.sum() == 32


def test_what_belongs_to_activations_and_the_cache_is_left_out(tmp_path):
    extra = {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    extra["model.layers.0.mlp.down_proj.input_scale"] = np.ones(1, np.float32)
    write(tmp_path, INT8, files.compressed_int8, extra=extra)
    assert not extra.keys() & convert.open_checkpoint(tmp_path).tensors.keys()


def test_a_packed_weight_is_read_once(tmp_path):
    parts, meant = files.gptq(48, 64, np.random.default_rng(0))
    memory = Memory({f"x{name}": array for name, array in parts.items()} | {"y": np.zeros((2, 2), np.float32)})
    asked, read = [], memory.read
    memory.read = lambda name, start, stop: asked.append(name) or read(name, start, stop)
    reader = dequantized(memory, {**GPTQ, "bits": 4}, "config.json")
    asked.clear()  # what told whether it can be kept
    joined = np.concatenate([reader.read("x.weight", row, row + 7) for row in range(0, 48, 7)])
    np.testing.assert_array_equal(joined, meant)
    assert sorted(asked) == ["x.g_idx", "x.qweight", "x.qzeros", "x.scales"]
    reader.read("y", 0, 2)
    reader.read("x.weight", 0, 1)
    assert len(asked) == 9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, r"'quant_method' is 'hqq', which is not supported; supported: gptq, awq"),
        ({}, "'quant_method' is None"),
        ("gptq", "'quantization_config' is 'gptq'; it must be an object"),
        ({**GPTQ, "bits": 5}, "'bits' is 5, which is not supported; supported: 2, 3, 4, 8"),
        ({**GPTQ, "bits": 4, "checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin'"),
        ({**GPTQ, "bits": 4, "is_marlin_format": True}, "'is_marlin_format' is True"),
        ({**GPTQ, "bits": 4, "dynamic": {"-:x": {}, "y": {"bits": 8}}}, "'dynamic' is"),
        ({**GPTQ, "bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"}, "contradict each other"),
        ({**GPTQ, "bits": 4, "desc_act": "yes"}, "'desc_act' is 'yes'; it must be true or false"),
        ({**GPTQ, "bits": 4, "group_size": 0}, "'group_size' is 0; it must be a positive integer, or -1"),
        ({**GPTQ, "bits": 3, "meta": {"quantizer": ["gptqmodel:1.4"]}}, "zero points of 3 bits in two ways"),
        ({**AWQ, "w_bit": 3}, "'bits' and 'w_bit' contradict each other"),
        ({**AWQ, "sym": True}, "'zero_point' and 'sym' contradict each other"),
        ({**GPTQ, "bits": 4, "pack_dtype": "int8"}, "'pack_dtype' is 'int8'"),
        ({**AWQ, "version": "gemv_fast"}, "'version' is 'gemv_fast'"),
        ({**AWQ, "version": "gemv", "group_size": None}, "version gemv is read with a 'group_size' and zero points"),
        ({**AWQ, "bits": 3}, "'bits' is 3"),
        ({**AWQ}, r"there is no tensor x\.scales"),
        ({"quant_method": "mxfp4"}, "says mxfp4, but no weight is stored so"),
        ({**DEEPSEEK, "weight_block_size": [128]}, r"'weight_block_size' is \[128\]; it must be two positive"),
        ({**DEEPSEEK, "fmt": "e5m2"}, "'fmt' is 'e5m2'"),
        ({**INT4, "format": "marlin-24"}, "'format' is 'marlin-24'"),
        ({**INT4, "transform_config": {"config_groups": {}}}, "'transform_config' is"),
        ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "only the format 'dense' is read"),
        (compressed("pack-quantized", num_bits=3), "'num_bits' is 3, which is not supported; supported: 4, 8"),
        (compressed("int-quantized", num_bits=8, strategy="channel", group_size=32), "'strategy' is channel"),
        (compressed("int-quantized", num_bits=8, strategy="group"), "'strategy' is group, 'group_size' None"),
        ({**INT4, "config_groups": {"a": 3}}, "'weights' must say how weights are stored"),
        ({**INT4, "config_groups": None}, "'config_groups' is None"),
        ({**INT4, "quantization_status": "calibration"}, "'quantization_status' is 'calibration'"),
        ({**BNB, "bnb_4bit_quant_storage": "float16"}, "'bnb_4bit_quant_storage' is 'float16'"),
    ],
)
def test_settings_that_are_not_handled_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        dequantized(Memory({"x.qweight": np.zeros((8, 8), np.int32)}), config, "config.json")


def damaged(maker, change, **options):
    parts, _ = maker(32, 64, np.random.default_rng(0), **options)
    change(parts)
    return Memory({f"x{name}": array for name, array in parts.items()})


def cut(name=None, *slices):
    """Without a name: nothing."""
    return lambda parts: parts.update({name: np.ascontiguousarray(parts[name][slices])} if name else {})


def replaced(name, value):
    return lambda parts: parts.update({name: value})


FIRST, ALL = slice(1), slice(None)
STATE = ".weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("config", "maker", "change", "message"),
    [
        ({**GPTQ, "bits": 4}, files.gptq, lambda p: p.pop(".qzeros"), r"there is no tensor x\.qzeros"),
        ({**GPTQ, "bits": 4}, files.gptq, cut(".scales", ALL, FIRST), r"x\.scales is F16 \[2, 1\]; expected"),
        ({**GPTQ, "bits": 8}, files.gptq, cut(".g_idx", FIRST), r"x\.qzeros is I32 \[2, 4\]; expected I32 \[2, 8\]"),
        ({**GPTQ, "bits": 4}, files.gptq, cut(".g_idx", FIRST), r"x\.g_idx is I32 \[1\]; expected I32 \[64\]"),
        ({**GPTQ, "bits": 4}, files.gptq, replaced(".g_idx", np.full(64, 2, np.int32)), r"g_idx names groups beyond"),
        ({**GPTQ, "bits": 4}, files.gptq, replaced(".qweight", np.zeros((8, 32))), "x.qweight is F64"),
        ({**GPTQ, "bits": 4, "group_size": 64}, files.gptq, cut(), "2 groups of 64 inputs; 'group_size' is 64"),
        ({**GPTQ, "bits": 4, "group_size": -1}, files.gptq, cut(), "2 groups of 64 inputs; 'group_size' is 64"),
        ({**GPTQ, "bits": 4, "desc_act": True}, files.gptq, lambda p: p.pop(".g_idx"), "there is no tensor x.g_idx"),
        ({**GPTQ, "bits": 4, "sym": True}, files.gptq, cut(), "zero points than 8, though 'sym' is true"),
        ({**GPTQ, "bits": 4, "rotation": "hadamard"}, files.gptq, cut(), "fields not understood: 'rotation'"),
        ({**DEEPSEEK, "e": 1}, partial(files.fp8, each="block", suffix="_scale_inv"), cut(), "not understood: 'e'"),
        ({**AWQ, "zero_point": False}, files.awq, cut(), "other zero points than 8, though the config says"),
        ({**AWQ, "group_size": 64}, files.awq, cut(), "2 groups of 64 inputs; 'group_size' is 64"),
        (AWQ, files.awq, cut(".qzeros", FIRST), r"x\.qzeros is I32 \[1, 4\]; expected I32 \[2, 4\]"),
        (INT4, files.compressed_packed, replaced(".weight_shape", np.array([32, 40])), r"is no \[32, 40\] of"),
        (INT4, files.compressed_packed, cut(".weight_scale", FIRST), r"x\.weight_scale is F32 \[1, 2\]"),
        (INT8, files.compressed_int8, replaced(".weight_scale", np.ones((7, 1), np.float32)), "which contradicts"),
        (INT8, files.compressed_int8, replaced(".weight_scale", np.ones((32, 5), np.float32)), "which contradicts"),
        (ORDERED, files.compressed_packed, cut(), "there is no tensor x.weight_g_idx"),
        (INT8, files.fp8, cut(), r"x\.weight is F8_E4M3, which contradicts 'config_groups'"),
        (
            compressed("pack-quantized", num_bits=4, strategy="group", group_size=64),
            files.compressed_packed,
            cut(),
            r"x\.weight_scale is \[32, 2\], which contradicts 'config_groups': \[\(32, 1\)\]",
        ),
        (SYMMETRIC, partial(files.compressed_packed, zeros=True), cut(), "zero points, though 'symmetric' is true"),
        (
            compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True),
            partial(files.compressed_int8, zeros=True),
            cut(),
            "x.weight_zero_point holds zero points, though 'symmetric' is true",
        ),
        ({**BNB, "bnb_4bit_quant_type": "fp4"}, files.bnb4, cut(), "'bnb_4bit_quant_type' is 'fp4', but weights are"),
        (DEEPSEEK, files.fp8, lambda p: p.pop(".weight_scale"), r"there is no tensor x\.weight_scale_inv"),
        (BNB, files.bnb4, cut(".weight", FIRST), r"x\.weight is U8 \[1, 1\]; expected U8 \[1024, 1\]"),
        (BNB, files.bnb4, cut(".weight.absmax", FIRST), r"x\.weight\.absmax is F32 \[1\]"),
        (BNB, files.bnb4, replaced(STATE, np.frombuffer(b"{", np.uint8)), "quant_state.bitsandbytes__nf4: Expecting"),
        (BNB, files.bnb4, replaced(STATE, np.frombuffer(b'{"shape": [2, -4]}', np.uint8)), "'shape' is"),
        (BNB, files.bnb8, replaced(".weight_format", np.array(2, np.uint8)), "is not stored row by row"),
    ],
)
def test_parts_that_do_not_fit_are_refused(config, maker, change, message):
    with pytest.raises(ValueError, match=message):
        whole(dequantized(damaged(maker, change), config, "config.json"), "x.weight")
