"""Mixtures of experts that others quantized: what is a format of ours is kept, experts or all but them alone too."""

import numpy as np
import pytest

import convert
from jaxinfer.config import Quantization
from jaxinfer.layerwise import restored
from jaxinfer.parameters import declare, flatten, is_quantized
from tests import tiny, wide_experts
from tests.convert.meshed import load_flat
from tests.convert.test_quantized import CASES

INT4, INT8 = Quantization("int4", 32), Quantization("int8", head=False)


def write(folder, case, chosen):
    """A Qwen2-MoE, of which projections are quantized if `chosen` says so of their names; returns what it means."""
    (settings, maker), rng = CASES[case], np.random.default_rng(0)
    stored, meant = {}, {}
    for name, array in wide_experts.tensors("qwen2_moe", num_hidden_layers=1).items():
        if not (name.endswith("_proj.weight") and chosen(name)):
            stored[name] = meant[name] = array
            continue
        parts, meant[name] = maker(*array.shape, rng)
        stored |= {name.removesuffix(".weight") + part: value for part, value in parts.items()}
    for where, tensors, extra in (("quantized", stored, {"quantization_config": settings}), ("floats", meant, {})):
        tiny.write_config(wide_experts.config("qwen2_moe", num_hidden_layers=1, **extra), folder / where)
        tiny.write_safetensors(tensors, folder / where)


def everything(name):
    return True


def experts_alone(name):
    return ".experts." in name


def all_but_experts(name):
    return ".experts." not in name


@pytest.mark.parametrize(
    ("case", "chosen", "kept", "said"),
    [
        ("gptq4_symmetric", everything, INT4, "the projections are kept in int4"),
        ("int8", everything, INT8, "the projections are kept in int8"),
        ("deepseek", everything, None, "the projections are read as floats"),
        (
            "int4",
            experts_alone,
            Quantization("int4", 32, layers=False),
            "the projections of experts are kept in int4, the others are read as floats",
        ),
        (
            "int8",
            all_but_experts,
            Quantization("int8", head=False, experts=False),
            "the projections are kept in int8, those of experts read as floats",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_kept_where_it_is_a_format_of_ours(case, chosen, kept, said, tmp_path, caplog):
    write(tmp_path, case, chosen)
    checkpoint = convert.open_checkpoint(tmp_path / "quantized")
    assert checkpoint.quantization == kept
    assert caplog.messages[-1].endswith(f": {said}")
    weights, parameters = load_flat(checkpoint, 2, quantization=kept), dict(flatten(declare(checkpoint.config)))
    floats = convert.open_checkpoint(tmp_path / "floats")
    for path, weight in weights.items():
        assert is_quantized(weight) == (kept is not None and parameters[path].contract > 0 and (
            "head" not in path and (kept.experts if parameters[path].batch else kept.layers)
        ))  # fmt: skip
        if parameters[path].contract and "head" not in path:
            got = restored(weight, parameters[path]) if is_quantized(weight) else weight
            np.testing.assert_array_equal(got, floats.read(path, np.float32), err_msg=path)
