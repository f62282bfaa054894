"""The StableHLO artifact of the forward pass: reloaded by a process that has jax and not our code."""

import json
import subprocess
import sys

import jax.export
import numpy as np
import pytest
from click.testing import CliRunner

import convert
from convert.__main__ import main
from jaxinfer import LLM, SamplingParams
from jaxinfer.export import DESCRIPTION, PROGRAM, export_forward
from tests import tiny
from tests.convert.meshed import load_flat
from tests.jaxinfer.conftest import TINY

RUN = """
import sys, numpy as np, jax.export
folder, weights, tokens, out = sys.argv[1:]
program = jax.export.deserialize(bytearray(open(folder + "/forward.stablehlo", "rb").read()))
np.save(out, program.call(dict(np.load(weights)), np.load(tokens)))
ours = [name for name in sys.modules if name.split(".")[0] in ("jaxinfer", "convert", "pallas_kernels", "meshes")]
assert not ours, ours
"""


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_another_process_computes_the_same(name, tmp_path):
    checkpoint = convert.open_checkpoint(tiny.write_checkpoint(name, tmp_path / "model"))
    folder = export_forward(checkpoint, tmp_path / "artifact", length=12)
    weights = {path: np.asarray(array) for path, array in load_flat(checkpoint).items()}
    described = json.loads((folder / DESCRIPTION).read_text())["weights"]
    assert {path: tuple(each["shape"]) for path, each in described.items()} == {
        path: array.shape for path, array in weights.items()
    }
    tokens = np.random.default_rng(0).integers(3, 99, (1, 12), np.int32)
    np.savez(tmp_path / "weights.npz", **weights)
    np.save(tmp_path / "tokens.npy", tokens)
    files = [folder, tmp_path / "weights.npz", tmp_path / "tokens.npy", tmp_path / "logits.npy"]
    command = [sys.executable, "-c", RUN, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logits = np.load(tmp_path / "logits.npy")[0].astype(np.float64)
    prompt = {"prompt_token_ids": tokens[0].tolist()}
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
    [scored] = LLM(str(checkpoint.path), **TINY).generate(prompt, sampling)
    expected = scored.prompt_logprobs
    assert expected.std(axis=-1).min() > 1
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    np.testing.assert_allclose(logprobs[: len(expected)], expected, rtol=0, atol=1e-4)
    assert len(expected) >= 11


def test_lengths_and_what_is_quantized_are_refused(tmp_path):
    checkpoint = convert.open_checkpoint(tiny.write_checkpoint("llama", tmp_path / "model"))
    with pytest.raises(ValueError, match="a length of 257 is not from 1 to the model's 256"):
        export_forward(checkpoint, tmp_path / "artifact", length=257)
    assert not (tmp_path / "artifact" / PROGRAM).exists()


def test_the_command_writes_it(tmp_path):
    tiny.write_checkpoint("llama", tmp_path / "model")
    arguments = [str(tmp_path / "model"), str(tmp_path / "artifact"), "--format", "stablehlo"]
    done = CliRunner().invoke(main, [*arguments, "--length", "9"])
    assert done.exit_code == 0, done.output
    assert "the forward pass of llama" in done.output
    program = jax.export.deserialize(bytearray((tmp_path / "artifact" / PROGRAM).read_bytes()))
    assert [shape.shape for shape in program.out_avals] == [(1, 9, 251)]
    refused = CliRunner().invoke(main, [*arguments, "--verify"])
    assert refused.exit_code == 2
    assert "which --format stablehlo does not write" in refused.output
