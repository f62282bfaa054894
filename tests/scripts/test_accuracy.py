"""The accuracy table: its arithmetic by hand, and every row on a tiny model."""

from contextlib import nullcontext

import numpy as np
import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from scripts import accuracy
from tests import tiny
from tests.jaxinfer import successor

MODEL = ModelConfig("llama", 251, 64, 2, 8, 2, 16, 256, 256, RopeConfig())
SETTINGS = {"max_num_batched_tokens": 16, "page_size": 8, "dtype": "float32"}
IDS = np.random.default_rng(0).integers(0, 251, 60).tolist()
MOST = {
    "kv int8": (1e-4, 0.003),
    "kv fp8": (2e-3, 0.003),
    "weights int8": (5e-4, 0.008),
    "weights fp8": (8e-3, 0.02),
    "weights and activations int8": (1.2e-3, 0.015),
    "weights and activations fp8": (1.5e-2, 0.04),
    "weights int4": (0.12, 0.03),
}
"""Bounds of the divergence and of the perplexity's change; a fifth of the former is less than what is measured."""


OF_ANY_MODEL = {name: variant for name, variant in accuracy.VARIANTS.items() if variant.made is nullcontext}
"""What takes no text, and so no tokenizer."""


@pytest.fixture(scope="module")
def results():
    return list(accuracy.compare(MODEL, IDS, OF_ANY_MODEL, **SETTINGS))


def test_every_row_is_close_to_the_unquantized_model_and_none_is_it(results):
    assert [result.name for result in results] == ["unquantized", *OF_ANY_MODEL]
    assert MOST.keys() == OF_ANY_MODEL.keys() == accuracy.VARIANTS.keys() - {"weights int4 calibrated"}
    for result in results[1:]:
        loss, change = MOST[result.name]
        assert loss / 5 < result.divergence < loss, result
        assert 0 < abs(result.change) < change, result


def test_calibrated_is_closer_than_rounded(tmp_path, monkeypatch):
    """Of a model that takes bytes for tokens, on another part of the text."""
    successor.write(tmp_path)  # for its tokenizer
    shape = {**tiny.CASES["llama"], "vocab_size": successor.VOCAB, "head_dim": 16, "num_hidden_layers": 1}
    monkeypatch.setitem(tiny.CASES, "llama", shape)
    tiny.write_checkpoint("llama", tmp_path)
    monkeypatch.setattr(accuracy, "CALIBRATION_TOKENS", 1024)
    rows = {name: accuracy.VARIANTS[name] for name in ("weights int4", "weights int4 calibrated")}
    ids = accuracy.first_tokens(str(tmp_path), 60)
    _, rounded, calibrated = accuracy.compare(str(tmp_path), ids, rows, **SETTINGS)
    assert calibrated.divergence < 0.7 * rounded.divergence


def test_what_calibrates_is_not_what_is_predicted():
    parts = [set(accuracy.text(chapters).split("\n\n")) for chapters in (accuracy.CHAPTERS, accuracy.CALIBRATION)]
    assert {part for part in parts[0] & parts[1] if len(part) > 40} == set()


def test_the_first_row_is_the_model_itself(results):
    assert (results[0].divergence, results[0].change, results[0].passed) == (0.0, 0.0, None)
    assert 200 < results[0].perplexity < 500, "random weights: about as many as the vocabulary"


def test_divergence_and_perplexity_by_hand():
    want, got = np.log([[0.5, 0.5], [0.25, 0.75]]), np.log([[0.25, 0.75], [0.25, 0.75]])
    assert accuracy.divergence(want, got) == pytest.approx(0.5 * (0.5 * np.log(2) + 0.5 * np.log(2 / 3)))
    assert accuracy.perplexity(want, [0, 1, 0]) == pytest.approx((0.5 * 0.25) ** -0.5)


def test_divergence_over_more_rows_than_are_compared_at_once():
    rows = np.log(np.random.default_rng(0).dirichlet(np.ones(5), (2, 300)))
    want = np.mean([(np.exp(p) * (p - q)).sum() for p, q in zip(*rows)])
    assert accuracy.divergence(*rows) == pytest.approx(want)


@pytest.mark.parametrize(
    ("values", "passed"),
    [((1e-3, 0.004), True), ((2e-3, 0.004), False), ((1e-3, -0.006), False)],
)
def test_a_row_passes_if_it_meets_every_target(values, passed):
    result = accuracy.Result("kv int8", values[0], 10.0, values[1], max_divergence=1e-3, max_change=0.005)
    assert result.passed is passed
    assert ("MISS" in accuracy.line(result)) is not passed
    assert "KL <= 0.001, perplexity within 0.5%" in accuracy.line(result)


def test_the_text_is_long_enough_and_refused_where_it_is_not(monkeypatch):
    class Words:
        def encode(self, text):
            return text.split()

    monkeypatch.setattr("jaxinfer.tokenizer.Tokenizer.load", lambda model: Words())
    assert len(accuracy.first_tokens("model", 2001)) == 2001
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, and 1000000 are asked for; lower --tokens"):
        accuracy.first_tokens("model", 1_000_000)
