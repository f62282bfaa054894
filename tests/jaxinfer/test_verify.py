"""`--verify` finds what a conversion must not change, down to a bit, and lets pass what it may."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import convert
from convert.__main__ import main
from jaxinfer.config import Quantization
from jaxinfer.parameters import Parameter, parts_of
from jaxinfer.verify import compare, verify
from pallas_kernels.formats import quantize
from tests import tiny

WIDE = {**tiny.CASES["llama"], "head_dim": 16, "num_hidden_layers": 1}
"""Groups of 32 divide the inputs of every projection."""
PROJECTION = Parameter((64, 3, 16), ("embed", None, None), contract=1)
FORMATS = [("int8", True), ("fp8", True), ("int4", True), ("int4", False)]
"""And whether it is symmetric."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CASES, "llama", WIDE)
        return tiny.write_checkpoint("llama", tmp_path_factory.mktemp("source") / "hf")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "options",
    [["--format", "safetensors"], ["--dtype", "bfloat16"], ["--quantization", "int8"]],
    ids=lambda options: options[1],
)
def test_what_was_converted_is_as_it_was_to_be(source, tmp_path, options):
    result = invoke(source, tmp_path / "made", *options, "--verify")
    assert result.exit_code == 0, result.output
    assert "the same bits" in result.output
    assert "MISMATCH" not in result.output
    quantized = "int8" in options
    assert ("int8, to nearest" in result.output) == quantized
    assert ("mean KL" if quantized else "max |Δlogprob| 0.0e+00") in result.output


def test_a_flipped_bit_is_found(source, tmp_path, monkeypatch):
    """The last bit of one number in one tensor of what was written."""
    save = convert.save_safetensors

    def flipped(checkpoint, folder, **options):
        written = save(checkpoint, folder, **options)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.0.mlp.up_proj.weight"].view(np.uint32)[5, 7] ^= 1
        save_file(tensors, file, metadata={"format": "pt"})
        return written

    monkeypatch.setattr("convert.export.save_safetensors", flipped)
    result = invoke(source, tmp_path / "made", "--format", "safetensors", "--verify")
    assert result.exit_code == 1
    assert "MISMATCH layers.0.mlp.gate_up: 1 of 12288 elements differ" in result.output


def test_another_config_is_found(source, tmp_path):
    made = convert.save_native(convert.open_checkpoint(source), tmp_path / "made", progress=False)
    manifest = json.loads((made / "jaxinfer.json").read_text())
    manifest["config"]["norm_eps"] = 0.1
    (made / "jaxinfer.json").write_text(json.dumps(manifest))
    report = verify(convert.open_checkpoint(source), convert.open_checkpoint(made))
    assert report.mismatches == ["config: norm_eps is 1e-05 in the source and 0.1 in the destination"]


def test_weights_that_are_alike_must_give_the_same(source, tmp_path, monkeypatch):
    made = convert.save_native(convert.open_checkpoint(source), tmp_path / "made", progress=False)
    monkeypatch.setattr("jaxinfer.verify.MAX_DIFFERENCE", -1.0)
    report = verify(convert.open_checkpoint(source), convert.open_checkpoint(made))
    assert report.mismatches == ["forward pass: log-probabilities differ by 0.00e+00"]


def weight(dtype=np.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal(PROJECTION.shape).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("format", "symmetric"), FORMATS)
def test_rounding_to_nearest_is_within_what_is_allowed(format, symmetric, dtype):
    want = weight(dtype)
    compared = compare("w", PROJECTION, want, quantize(want, format, group_size=64, symmetric=symmetric))
    assert compared.mismatch is None
    assert 0.8 < compared.worst <= 1.0


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_two_steps_beside_the_nearest_are_found(format):
    """Of one value."""
    want = weight()
    made = quantize(want, format, group_size=32)
    values = np.array(made.values)
    values.view(np.uint8)[1, 2, 3] ^= 2
    compared = compare("w", PROJECTION, want, dataclasses.replace(made, values=jnp.asarray(values)))
    assert f"times the rounding error of {format}" in compared.mismatch


def test_calibrated_weights_are_compared_bit_by_bit():
    want = quantize(weight(), "int4", group_size=32)
    for name, part in parts_of(want).items():
        array = np.array(part)
        array.reshape(-1).view(np.uint8)[11] ^= 1
        compared = compare("w", PROJECTION, want, dataclasses.replace(want, **{name: jnp.asarray(array)}))
        assert compared.mismatch == f"w.{name}: 1 of {part.size} elements differ"
    assert compare("w", PROJECTION, want, want).mismatch is None


def test_nan_is_compared_like_any_other_bits_and_never_within_rounding():
    parameter, want = Parameter((64,), ("embed",)), np.ones(64, np.float32)
    want[3] = np.nan
    assert compare("w", parameter, want, want.copy()).mismatch is None
    made = quantize(weight(), "int8")
    broken = dataclasses.replace(made, scales=made.scales.at[0].set(np.nan))
    assert compare("w", PROJECTION, weight(), broken).mismatch is not None


def test_quantized_in_the_source_only_is_found():
    assert compare("w", PROJECTION, quantize(weight(), "int8"), weight()).mismatch is not None


def test_another_dtype_is_found(source):
    compared = compare("w", PROJECTION, weight(), weight("bfloat16"))
    assert compared.mismatch == "w: float32 [64, 3, 16] in the source, bfloat16 [64, 3, 16] in the destination"


def test_a_dry_run_has_nothing_to_verify(source, tmp_path):
    result = invoke(source, tmp_path / "made", "--dry-run", "--verify")
    assert result.exit_code == 2
    assert "nothing to --verify" in result.output


def test_how_many_tensors_were_compared_and_how(source, tmp_path):
    made = convert.save_native(
        convert.open_checkpoint(source), tmp_path / "made", quantization=Quantization("int4", 32), progress=False
    )
    report = verify(convert.open_checkpoint(source), convert.open_checkpoint(made))
    assert not report.mismatches
    assert [(row.kind, row.count) for row in report.rows] == [("the same bits", 5), ("int4, to nearest", 4)]
