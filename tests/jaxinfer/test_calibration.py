"""Calibrated 4-bit checkpoints: closer than with rounding to nearest, by the command line too, or refused."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import convert
from convert.__main__ import main
from convert.destination import resumable_scratch
from convert.journal import Journal
from jaxinfer.calibration import MIN_TOKENS, Ready, calibrate, gptq
from jaxinfer.calibration.experts import calibrate_experts
from jaxinfer.config import ModelConfig, Quantization, RopeConfig
from jaxinfer.layerwise import LayerByLayer, restored
from jaxinfer.parameters import abstract_parameter, declare, flatten, is_stored_in, moe_parameters, quantized
from pallas_kernels.moe import reference
from tests import tiny, wide_experts
from tests.jaxinfer import successor

WIDE = {**tiny.CASES["llama"], "head_dim": 16, "num_hidden_layers": 2}
"""Groups of 32 divide the inputs of every projection."""
INT4 = Quantization("int4", 32)
IDS = np.random.default_rng(0).zipf(1.3, MIN_TOKENS) % 251
nearest, mean = jax.jit(quantized, static_argnums=(1, 2)), jax.jit(restored, static_argnums=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CASES, "llama", WIDE)
        return convert.open_checkpoint(tiny.write_checkpoint("llama", tmp_path_factory.mktemp("source")))


@pytest.fixture(scope="module")
def ready(source, tmp_path_factory):
    ready = Ready(tmp_path_factory.mktemp("ready"))
    calibrate(source, IDS, INT4, ready, progress=False)
    return ready


def test_closer_than_rounding_to_nearest(source, ready):
    model = LayerByLayer(source, 256, np.float32)
    parameters = dict(flatten(declare(source.config)))

    def hidden_states(change):
        """Of the first sequence. change: path, parameter and weight of a projection → the weight to take."""
        hidden = model.embedded(IDS[:256])
        for layer in range(model.config.num_layers):
            weights = model.layer_weights(layer)
            weights |= {path: change(path, parameters[path], weights[path]) for path in weights if path in ready}
            hidden = model.run(layer, weights, hidden)
        return np.asarray(hidden)

    want = hidden_states(lambda path, parameter, weight: weight)
    nearest = hidden_states(lambda path, parameter, weight: restored(quantized(weight, parameter, INT4), parameter))
    made = hidden_states(lambda path, parameter, weight: restored(ready[path], parameter))
    assert np.square(made - want).mean() < 0.6 * np.square(nearest - want).mean()


def test_all_projections_are_made_in_their_declared_shapes(source, ready):
    declared = {path: p for path, p in flatten(declare(source.config)) if is_stored_in(p, INT4)}
    assert set(ready) == set(declared)
    assert len(ready) == 2 * 4
    for path, parameter in declared.items():
        want = abstract_parameter(parameter, np.float32, lambda axes: None, INT4)
        assert (ready[path].values.shape, ready[path].scales.shape) == (want.values.shape, want.scales.shape)


def test_experts_are_calibrated_on_what_chose_them(caplog):
    """The others' inputs are alike, but in other proportions; one expert took too little, one nothing."""
    config = ModelConfig(
        "mixtral", 11, 64, 1, 2, 2, 32, 64, 16, RopeConfig(), num_experts=3, experts_per_token=1, expert_size=64
    )
    rng, parameters = np.random.default_rng(0), moe_parameters(config)
    spread = np.arange(1, 65, dtype=np.float32)[:, None] ** -0.7
    mixes = [spread * rng.standard_normal((64, 64), np.float32) for _ in range(2)]
    chosen = np.array([0] * 300 + [1] * 20).reshape(-1, 1)
    rows = np.concatenate(
        [rng.standard_normal((count, 64), np.float32) @ mixes[n] for n, count in enumerate((300, 20))]
    )
    order = rng.permutation(320)
    weights = {
        name: jnp.asarray(rng.standard_normal(parameters[name].shape, np.float32) / 8)
        for name in ("expert_gate_up", "expert_down")
    }
    made = calibrate_experts(rows[order], chosen[order], weights, config, INT4, np.float32, "layers.0")
    assert "layers.0: 2 of 3 experts took fewer than 32 tokens of the text; they are rounded" in caplog.text
    x = rng.standard_normal((500, 64), np.float32) @ mixes[0]
    each = {
        "exact": weights,
        "made": {name: mean(weight, parameters[name]) for name, weight in made.items()},
        "nearest": {
            name: mean(nearest(weight, parameters[name], INT4), parameters[name]) for name, weight in weights.items()
        },
    }
    first, both = {}, {}
    for name, own in each.items():
        gate, up = np.moveaxis(np.tensordot(x, np.asarray(own["expert_gate_up"][0]), 1), 1, 0)
        first[name], both[name] = up, reference.activation_of("silu", gate, up) @ np.asarray(own["expert_down"][0])
    for outputs, share in ((first, 0.3), (both, 0.6)):
        error = {name: np.square(outputs[name] - outputs["exact"]).mean() for name in ("made", "nearest")}
        assert error["made"] < share * error["nearest"]
    for name in weights:
        np.testing.assert_array_equal(each["made"][name][1:], each["nearest"][name][1:])


def test_an_interrupted_calibration_goes_on(source, ready, tmp_path, monkeypatch):
    """Within the first layer; a weight that is damaged since is made again."""
    made, original = [], gptq

    def counted(*arguments):
        made.append(1)
        if len(made) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(sys.modules[calibrate.__module__], "gptq", counted)

    def run():
        with resumable_scratch(tmp_path / "x", "same") as finished:
            again = Ready(finished.folder, finished)
            calibrate(source, IDS, INT4, again, progress=False)
            return {path: again[path] for path in again}

    with pytest.raises(KeyboardInterrupt):
        run()
    os.truncate(tmp_path / ".x.scratch" / "layers.0.attention.out.values", 5)
    again = run()
    assert len(made) == 4 + len(ready) - 2
    for path, weight in ready.items():
        for part, other in zip(jax.tree.leaves(weight), jax.tree.leaves(again[path]), strict=True):
            np.testing.assert_array_equal(part, other, err_msg=path)
    assert not list(tmp_path.iterdir())


def test_a_model_with_experts(tmp_path):
    source = convert.open_checkpoint(wide_experts.write("qwen2_moe", tmp_path / "hf", num_hidden_layers=1))
    finished = Journal(tmp_path / "ready", "same")
    ready = Ready(finished.folder, finished)
    calibrate(source, IDS % 99, INT4, ready, progress=False)
    declared = {path: p for path, p in flatten(declare(source.config)) if is_stored_in(p, INT4)}
    assert set(ready) == set(declared)
    for path, parameter in declared.items():
        want = abstract_parameter(parameter, np.float32, lambda axes: None, INT4)
        assert (ready[path].values.shape, ready[path].scales.shape) == (want.values.shape, want.scales.shape)
        if parameter.batch:
            rounded = nearest(jnp.asarray(source.read(path, np.float32)), parameter, INT4)
            share = np.mean(np.asarray(rounded.values) != ready[path].values, axis=(*range(1, rounded.values.ndim),))
            assert (share > 0.05).sum() >= 4  # of 6 experts, some of which may have seen too little
    # Interrupted between the two projections of the experts, it makes both again, from the weights as they were.
    before = jax.tree.map(np.copy, dict(ready))
    (finished.folder / "layers.0.mlp.expert_down.values").unlink()
    again = Ready(finished.folder, finished)
    calibrate(source, IDS % 99, INT4, again, progress=False)
    finished.close()
    for path, weight in before.items():
        for part, other in zip(jax.tree.leaves(weight), jax.tree.leaves(again[path]), strict=True):
            np.testing.assert_array_equal(part, other, err_msg=path)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A checkpoint with a tokenizer that takes a byte for a token."""
    folder = successor.write(tmp_path_factory.mktemp("speaking"))
    rng = np.random.default_rng(1)
    shape = {**WIDE, "vocab_size": successor.VOCAB, "bos_token_id": 0, "eos_token_id": 1, "num_hidden_layers": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CASES, "llama", shape)
        tiny.write_checkpoint("llama", folder)
    text = folder / "text.txt"
    text.write_bytes(bytes(rng.integers(97, 123, 2 * MIN_TOKENS, np.uint8)))
    return folder, text


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_command_line(speaking, tmp_path):
    folder, text = speaking
    arguments = "--quantization", "int4", "--dtype", "bfloat16", "--verify"
    result = invoke(folder, tmp_path / "native", *arguments, "--zero-points", "--calibrate", text)
    assert result.exit_code == 0, result.output
    assert "llama, 1 layers, bfloat16 and int4" in result.output
    assert "MISMATCH" not in result.output
    assert "mean KL" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
    written = convert.open_checkpoint(tmp_path / "native")
    assert written.quantization == Quantization("int4", 32, symmetric=False)
    assert invoke(folder, tmp_path / "nearest", *arguments, "--zero-points").exit_code == 0
    made, nearest = (
        LayerByLayer(checkpoint, 16, "bfloat16").read("layers.0.mlp.down")
        for checkpoint in (written, convert.open_checkpoint(tmp_path / "nearest"))
    )
    assert np.asarray(made.scales).dtype == "bfloat16"
    assert 0.05 < np.mean(np.asarray(made.values) != np.asarray(nearest.values)) < 0.95


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 1 tokens, and calibration takes 512 or more"),  # BOS alone
        (b"too short", "has 10 tokens, and calibration takes 512 or more"),
        (b"\xff\xfe" * 600, "is not UTF-8 text"),
    ],
    ids=["empty", "short", "binary"],
)
def test_texts_that_are_refused(speaking, tmp_path, content, message):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    result = invoke(speaking[0], tmp_path / "native", "--quantization", "int4", "--calibrate", text)
    assert result.exit_code == 1
    assert message in result.output
    assert not (tmp_path / "native").exists()


def test_only_int4_is_calibrated(speaking, tmp_path, source):
    folder, text = speaking
    result = invoke(folder, tmp_path / "native", "--quantization", "int8", "--calibrate", text)
    assert result.exit_code == 2
    assert "--calibrate needs --quantization int4" in result.output
    assert invoke(folder, tmp_path / "native", "--calibrate", text).exit_code == 2
    with pytest.raises(ValueError, match="int8 is not calibrated"):
        calibrate(source, IDS, Quantization("int8"), Ready(tmp_path))


def test_a_text_that_is_not_there_and_a_model_without_tokenizer(speaking, source, tmp_path):
    result = invoke(speaking[0], tmp_path / "native", "--quantization", "int4", "--calibrate", tmp_path / "none.txt")
    assert result.exit_code == 2
    assert "none.txt' does not exist" in result.output
    result = invoke(source.path, tmp_path / "native", "--quantization", "int4", "--calibrate", speaking[1])
    assert result.exit_code == 1
    assert "tokenizer" in result.output


def test_what_is_quantized_already_is_refused(source, tmp_path):
    convert.save_native(source, tmp_path / "int8", quantization=Quantization("int8"), progress=False)
    with pytest.raises(ValueError, match="is quantized to int8 already"):
        calibrate(convert.open_checkpoint(tmp_path / "int8"), IDS, INT4, Ready(tmp_path))
