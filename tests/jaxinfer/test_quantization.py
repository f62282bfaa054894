"""Quantized weights through the whole product: close to the float model, on any mesh, however they were made."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.config import WEIGHT_FORMATS, ModelConfig, Quantization, RopeConfig
from jaxinfer.parameters import declare, flatten, for_tensor_parallel, is_quantized, parts_of, stored_axes
from jaxinfer.weights import random_weights
from meshes import RULES, build_mesh
from pallas_kernels.formats import FORMATS, dequantize, quantize
from tests import tiny
from tests.jaxinfer.conftest import TINY
from tests.jaxinfer.prompts import VOCAB, assert_same_listed, ids, tokens
from tests.jaxinfer.test_tensor_parallel import count, decode_program

WIDE = {**tiny.CASES["llama"], "head_dim": 16, "intermediate_size": 256}
"""Groups of 32 divide the inputs of every projection, on two devices and four as well."""
SMALL = ModelConfig("llama", VOCAB, 64, 2, 8, 2, 16, 256, 256, RopeConfig())
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
DIVERGENCE = {"int8": 2e-3, "fp8": 8e-2, "int4": 0.5}
"""Bounds of the mean KL divergence from the float model. These random weights, 64 inputs wide and with logits above 1,
are far harder than a trained model's."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of a float checkpoint that every format fits."""
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CASES, "llama", WIDE)
        return tiny.write_checkpoint("llama", folder)


@pytest.fixture(scope="module")
def llms(wide):
    """`llms(format, **settings)`: the same one when asked again."""
    made = {}

    def make(format, model=wide, **settings):
        key = format, model, *sorted(settings.items())
        if key not in made:
            made[key] = LLM(str(model), quantization=format, **{**TINY, **settings})
        return made[key]

    return make


def logprobs(llm):
    """[prompt, vocab] of one prompt of several chunks."""
    [output] = llm.generate(ids(60), SCORED)
    return output.prompt_logprobs.astype(np.float64)


def divergence(want, got):
    return (np.exp(want) * (want - got)).sum(-1).mean()


def test_the_formats_are_those_of_the_kernels():
    assert set(WEIGHT_FORMATS) == set(FORMATS)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_close_to_the_float_model_and_not_the_same(format, llms):
    loss = divergence(logprobs(llms(None)), logprobs(llms(format)))
    assert DIVERGENCE[format] / 4 < loss < DIVERGENCE[format]


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_computes_what_the_rounded_float_weights_compute(format, llms, wide, tmp_path):
    """A float checkpoint whose projections hold the values that the quantized ones stand for."""
    tensors, size = load_file(wide / "model.safetensors"), llms(format).quantization.group_size
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or (name == "lm_head.weight" and format != "int4"):
            options = {} if size is None else {"group_size": size}
            tensors[name] = np.asarray(dequantize(quantize(tensor.T, format, **options), np.float32))
    tiny.write_config(WIDE, tmp_path)
    tiny.write_safetensors(tensors, tmp_path)
    np.testing.assert_allclose(logprobs(llms(format)), logprobs(llms(None, tmp_path)), rtol=0, atol=2e-4)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_two_devices_give_what_one_gives(format, llms):
    one = llms(format)
    two = llms(format, tensor_parallel_size=2)
    np.testing.assert_allclose(logprobs(two), logprobs(one), rtol=0, atol=1e-4)
    prompts = [ids(5), ids(20)]
    first, second = one.generate(prompts, GREEDY), two.generate(prompts, GREEDY)
    assert tokens(first) == tokens(second)
    for output, other in zip(first, second, strict=True):
        assert_same_listed(output.outputs[0].logprobs, other.outputs[0].logprobs)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_a_native_checkpoint_gives_the_same_as_quantizing_while_loading(format, llms, wide, tmp_path):
    source, target = convert.open_checkpoint(wide), tmp_path / "native"
    convert.save_native(source, target, quantization=Quantization(format), progress=False)
    for asked in (None, format):
        stored = LLM(str(target), quantization=asked, **TINY)
        assert stored.quantization == llms(format).quantization
        assert stored.weight_bytes == llms(format).weight_bytes
    np.testing.assert_array_equal(logprobs(stored), logprobs(llms(format)))


def test_zero_points_and_groups_are_loaded_as_they_are_stored(llms, wide, tmp_path):
    target = tmp_path / "native"
    quantization = Quantization("int4", 32, symmetric=False)
    convert.save_native(convert.open_checkpoint(wide), target, quantization=quantization, progress=False)
    stored = LLM(str(target), **TINY)
    assert stored.quantization == quantization
    assert divergence(logprobs(llms(None)), logprobs(stored)) < divergence(logprobs(llms(None)), logprobs(llms("int4")))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_no_full_precision_projection_is_left_on_the_devices(format, tied):
    """Every array alive that loading made is counted."""
    held = jax.live_arrays()  # or one of theirs could go, and one of ours have its id
    before = {id(array) for array in held}
    config = dataclasses.replace(SMALL, tied_head=tied)
    weights = random_weights(config, np.dtype("float32"), build_mesh(), quantization=_resolved(format))
    sizes = {path: parameter.inputs for path, parameter in flatten(declare(config))}
    made = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in made) == sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    for path, leaf in flatten(weights):
        projection = path.endswith((".qkv", ".out", ".gate_up", ".down")) or (
            path == "head.weight" and format != "int4"
        )
        assert is_quantized(leaf) == projection, path
        if projection:
            assert (
                leaf.values.nbytes * (2 if format == "int4" else 1)
                == leaf.values.size // leaf.values.shape[-1] * (sizes[path])
            )


def _resolved(format):
    return Quantization(format, 32) if format == "int4" else Quantization(format)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_random_weights_are_those_of_the_float_model_quantized(format):
    mesh, dtype = build_mesh(tensor=2), np.dtype("float32")
    physical = for_tensor_parallel(SMALL, 2)
    plain = dict(flatten(random_weights(physical, dtype, mesh, 3)))
    for path, leaf in flatten(random_weights(physical, dtype, mesh, 3, _resolved(format))):
        if not is_quantized(leaf):
            np.testing.assert_array_equal(leaf, plain[path])
            continue
        contract = 3 if path.endswith(".out") else 1
        options = {"group_size": 32} if format == "int4" else {}
        want = quantize(np.asarray(plain[path]), format, contract=contract, **options)
        for name, part in parts_of(leaf).items():
            np.testing.assert_array_equal(part, parts_of(want)[name], err_msg=f"{path}.{name}")


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_every_part_is_sharded_like_the_outputs_or_the_inputs_of_its_projection(format):
    mesh = build_mesh(tensor=4)
    physical = for_tensor_parallel(SMALL, 4)
    parameters = dict(flatten(declare(physical)))
    for path, leaf in flatten(random_weights(physical, np.dtype("float32"), mesh, 0, _resolved(format))):
        if not is_quantized(leaf):
            continue
        axes = stored_axes(parameters[path], leaf)
        for name, part in parts_of(leaf).items():
            sharded = "tensor" in [RULES[axis] for axis in axes[name] if axis]
            shards = 4 if sharded else 1
            assert [shard.data.nbytes for shard in part.addressable_shards] == [part.nbytes // shards] * 4, path
            assert sharded or (name == "scales" and format != "int4"), (path, name)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_quantized_layer_costs_two_all_reduces_and_nothing_else(format):
    one, two = (decode_program(layers, size=2, quantization=format) for layers in (1, 2))
    assert count("all-reduce", two) - count("all-reduce", one) == 2
    assert count("all-reduce", one) == 2 + 1
    for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert count(kind, two) == count(kind, one) == (kind == "all-gather"), kind


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="quantization is 'int3'; it must be one of int8, int4, fp8, or None"):
        LLM(SMALL, quantization="int3", **TINY)


def test_another_format_than_the_stored_one_is_refused(wide, tmp_path):
    target = tmp_path / "native"
    convert.save_native(convert.open_checkpoint(wide), target, quantization=Quantization("int8"), progress=False)
    message = "native is quantized to int8 already, and quantization is 'fp8'; leave quantization out, or load"
    with pytest.raises(ValueError, match=message):
        LLM(str(target), quantization="fp8", **TINY)


def test_a_model_that_no_group_fits_is_refused():
    config = dataclasses.replace(SMALL, mlp_size=80)
    with pytest.raises(ValueError, match="does not fit projections of 64, 80, 128 inputs; group sizes that fit: none"):
        LLM(config, quantization="int4", **TINY)


def test_groups_that_a_mesh_would_cut_are_refused():
    message = (
        "int4 groups of 64 do not divide the 32 inputs of layers.0.attention.out on each device; "
        "use a smaller tensor_parallel_size, int8, or python -m convert with a smaller --group-size"
    )
    with pytest.raises(ValueError, match=message):
        LLM(SMALL, quantization="int4", tensor_parallel_size=4, **TINY)


def test_only_int4_has_groups():
    with pytest.raises(ValueError, match="only int4 has groups and zero points; int8 has one scale per output"):
        Quantization("int8", 32)
