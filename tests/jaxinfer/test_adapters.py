"""LoRA adapters kept beside the weights: as merged ones compute, several in a batch, loaded while the model runs."""

import contextlib
import json
import re
import threading

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert.adapters import Adapter, adaptable
from jaxinfer import LLM, SamplingParams
from jaxinfer.adapters import Adapters, projections
from jaxinfer.engine.batch import BatchShape, fields
from jaxinfer.parameters import is_quantized
from tests import tiny
from tests.convert.test_lora import CONFIG, factors, pair
from tests.jaxinfer.conftest import TINY
from tests.jaxinfer.prompts import ids

CASE = "llama_biases"
"""Two kv heads of 10 dimensions, every bias, a tied head."""
SHAPES = {
    "self_attn.q_proj": (80, 64),
    "self_attn.k_proj": (20, 64),
    "self_attn.v_proj": (20, 64),
    "self_attn.o_proj": (64, 80),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
LENGTHS = (20, 9, 13, 5)
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1)


def write(folder, base, modules, *, rank=4, seed=0, **changes):
    """An adapter that changes these modules of two layers."""
    folder.mkdir()
    config = {**CONFIG, "base_model_name_or_path": str(base), "r": rank, "lora_alpha": rank, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in (0, 2):
        for number, module in enumerate(modules):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors |= pair(name, *factors(rank, *SHAPES[module], seed * 100 + layer * 10 + number))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    folder, base = tmp_path_factory.mktemp("adapters"), models.checkpoint(CASE)
    return {
        "all": write(folder / "all", base, SHAPES, seed=1),
        "few": write(folder / "few", base, ["self_attn.v_proj", "mlp.up_proj"], rank=2, seed=2, lora_alpha=6),
        "base": base,
    }


def scores(llm, names, lengths=LENGTHS):
    """[length, vocab] of each prompt, all in one call."""
    outputs = llm.generate([ids(length) for length in lengths], SCORED, lora=names)
    return [np.asarray(output.prompt_logprobs) for output in outputs]


def assert_close(first, second, limit=1e-4):
    for rows, other in zip(first, second, strict=True):
        assert np.abs(rows - other).max() <= limit


@pytest.fixture(scope="module")
def merged(folders):
    """Name → what the model computes with this adapter merged into it."""
    found = {name: scores(LLM(str(folder), **TINY), None) for name, folder in folders.items()}
    assert np.abs(found["all"][0] - found["base"][0]).max() > 0.5
    assert np.abs(found["few"][0] - found["base"][0]).max() > 0.5
    return found


def apart(folders, **settings):
    names = {name: str(folders[name]) for name in ("all", "few")}
    return LLM(str(folders["base"]), **{**TINY, "lora": names, **settings})


@contextlib.contextmanager
def nothing_compiles():
    compiled = []

    def listener(event, *_, **__):
        if event.startswith("/jax/core/compile/"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield
    jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled


@pytest.fixture(scope="module")
def llm(folders):
    """With room for one more; made without any."""
    llm = apart(folders, lora=None, max_loras=3, max_lora_rank=4)
    with nothing_compiles():
        for name in ("all", "few"):
            llm.load_lora(name, str(folders[name]))
    return llm


def assert_mixed(mixed, merged, limit=1e-4):
    """`mixed`: of a batch with both adapters, and a request without."""
    assert_close(mixed, [merged["all"][0], merged["base"][1], merged["few"][2], merged["all"][3]], limit)


MIXED = ["all", None, "few", "all"]


def test_several_in_a_batch_equal_merged_models(llm, merged):
    """And no neighbour's adapter changes a bit of a request without one."""
    mixed = scores(llm, MIXED)
    assert_mixed(mixed, merged)
    [alone] = scores(llm, None, LENGTHS[1:2])
    np.testing.assert_array_equal(alone, mixed[1])
    assert_close(scores(llm, "few"), merged["few"])


def test_on_a_mesh_that_replicates_kv_heads(folders, merged):
    llm = apart(folders, tensor_parallel_size=4)
    assert_mixed(scores(llm, MIXED), merged)
    lora = llm.engine._runner._weights["layers"][0]["attention"]["lora"]
    [program] = [p.as_text() for shape, p in llm.engine._runner._executables.items() if shape.scored]
    assert len(re.findall(r" all-reduce\(", program)) == 2 * llm.config.num_layers + 1  # as without adapters
    local = {name: leaf.addressable_shards[0].data.shape for name, leaf in lora.items()}
    assert local == {"qkv_a": (2, 12, 64), "qkv_b": (2, 12, 1, 4, 10), "out_a": (2, 4, 1, 2, 10), "out_b": (2, 4, 64)}


def test_the_weights_may_be_quantized(folders, merged):
    llm = apart(folders, quantization="int8")
    assert is_quantized(llm.engine._runner._weights["layers"][0]["mlp"]["gate_up"])
    mixed = scores(llm, MIXED)
    assert_mixed(mixed, merged, limit=0.25)
    assert np.abs(mixed[1] - merged["base"][1]).max() > 1e-3


def test_decoding_goes_on_with_the_adapter(llm):
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    outputs = llm.generate([ids(length) for length in LENGTHS], params, lora=MIXED)
    for output, name in zip(outputs, MIXED, strict=True):
        [choice] = output.outputs
        sequence = {"prompt_token_ids": output.prompt_token_ids + choice.token_ids[:-1]}
        [whole] = llm.generate(sequence, SCORED, lora=name)
        rows = np.asarray(whole.prompt_logprobs)[-6:]
        assert rows.argmax(-1).tolist() == choice.token_ids
        chosen = [entries[token].logprob for entries, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        np.testing.assert_allclose(rows.max(-1), chosen, atol=1e-4)


def test_loading_one_compiles_nothing(llm, folders):
    """Into a free place, and into one that was freed, whatever is in the others."""
    before = scores(llm, MIXED)
    with nothing_compiles():
        llm.load_lora("third", str(folders["few"]))
        assert_close(scores(llm, "third"), scores(llm, "few"), limit=1e-5)
        with pytest.raises(ValueError, match="all 3 places are taken, by all, few, third; unload one, or raise max_l"):
            llm.load_lora("fourth", str(folders["few"]))
        llm.unload_lora("third")
        llm.load_lora("again", str(folders["all"]))
        again = scores(llm, ["again", None, "few", "all"])
        llm.unload_lora("again")
    assert_close(again, before, limit=1e-5)


def test_names_that_are_not_loaded_are_refused(llm, folders, models):
    with pytest.raises(ValueError, match="there is no adapter 'some'; loaded: all, few"):
        llm.generate(ids(3), lora="some")
    with pytest.raises(ValueError, match="there is no adapter 'some'; loaded: all, few"):
        llm.generate([], lora="some")
    with pytest.raises(ValueError, match="1 names of adapters for 2 prompts; pass one for all, or one per prompt"):
        llm.generate([ids(3), ids(4)], lora=["all"])
    with pytest.raises(ValueError, match="there is an adapter 'few' already"):
        llm.load_lora("few", str(folders["few"]))
    stream = llm.stream(ids(3), lora="few")
    next(stream)
    with pytest.raises(ValueError, match="requests with the adapter 'few' are unfinished; wait for them, or close"):
        llm.unload_lora("few")
    stream.close()
    with pytest.raises(ValueError, match="this LLM has no places for adapters; make it with max_loras"):
        models("llama").generate(ids(3), lora="all")
    with pytest.raises(ValueError, match="max_lora_rank needs max_loras"):
        LLM(str(folders["base"]), **TINY, max_lora_rank=4)
    with pytest.raises(ValueError, match="has rank 4, and max_lora_rank is 2; raise that"):
        apart(folders, max_lora_rank=2)
    with pytest.raises(ValueError, match="max_lora_rank is 0; it must be at least 1"):
        apart(folders, max_lora_rank=0)


@pytest.mark.parametrize("lora", ["all", ["all"], {"all": ""}, {None: "all"}])
def test_adapters_that_are_no_names_and_folders_are_refused(lora, folders):
    with pytest.raises(ValueError, match=r"lora is .*; it must be a dict of names and folders or Hub ids"):
        apart(folders, lora=lora)


GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def test_a_place_is_that_of_the_name_when_the_request_is_queued(llm, folders, monkeypatch):
    """Never that of an adapter which took the place since."""
    gone = pytest.raises(ValueError, match="there is no adapter 'third'; loaded: all, few, other")
    llm.load_lora("third", str(folders["few"]))
    stream = llm.stream(ids(3), GREEDY, lora="third")
    llm.unload_lora("third")
    llm.load_lora("other", str(folders["all"]))
    with gone:
        next(stream)
    llm.unload_lora("other")

    def replaced(request, check=llm.engine.check):
        check(request)
        llm.unload_lora("third")
        llm.load_lora("other", str(folders["all"]))

    llm.load_lora("third", str(folders["few"]))
    with monkeypatch.context() as patch, gone:
        patch.setattr(llm.engine, "check", replaced)
        llm.generate(ids(3), GREEDY, lora="third")
    assert not llm.engine.has_unfinished
    llm.unload_lora("other")


def test_unloading_waits_for_a_request_that_is_being_queued(llm, folders, monkeypatch):
    refused = []

    def unload():
        try:
            llm.unload_lora("third")
        except ValueError as error:
            refused.append(str(error))

    thread = threading.Thread(target=unload)

    def interrupted(request, add=llm.engine.add):
        thread.start()
        thread.join(0.2)
        return add(request)

    llm.load_lora("third", str(folders["few"]))
    stream = llm.stream(ids(3), GREEDY, lora="third")
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add", interrupted)
        next(stream)
    thread.join()
    stream.close()
    assert refused == ["requests with the adapter 'third' are unfinished; wait for them, or close their streams"]
    llm.unload_lora("third")


def test_an_adapter_that_is_not_finite_is_refused(llm, folders, tmp_path):
    """Of a stranger too the factors are multiplied, by zero."""
    before = scores(llm, None, LENGTHS[:1])
    folder = write(tmp_path / "nan", folders["base"], ["mlp.down_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"][0, 0] = np.nan
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"inf or NaN in layers\.2\.mlp\.down, as float32"):
        llm.load_lora("third", str(folder))
    assert llm._adapters.names == ["all", "few"]
    np.testing.assert_array_equal(scores(llm, None, LENGTHS[:1]), before)


@pytest.fixture
def half(folders, models):
    """Two places in float16, beside no weights."""
    checkpoint = convert.open_checkpoint(folders["base"])
    layers = [{"attention": {}, "mlp": {}} for _ in range(checkpoint.config.num_layers)]
    dtype, mesh = np.dtype("float16"), models("llama").mesh
    return Adapters(checkpoint, checkpoint.config, {"layers": layers}, mesh, dtype=dtype, places=2, rank=4)


def test_what_float16_does_not_hold_is_refused(half, folders, tmp_path):
    folder = write(tmp_path / "large", folders["base"], ["mlp.up_proj"], lora_alpha=4e6)
    with pytest.raises(ValueError, match=r"large has inf or NaN in layers\.0\.mlp\.gate_up, as float16"):
        half.load("large", folder)
    assert not half.names


def test_threads_that_load_take_places_of_their_own(half, folders, monkeypatch):
    thread = threading.Thread(target=half.load, args=("second", folders["all"]))

    def meanwhile(self, *args, factors=Adapter.factors):
        if threading.current_thread() is not thread:
            thread.start()
            thread.join(0.5)
        return factors(self, *args)

    monkeypatch.setattr(Adapter, "factors", meanwhile)
    half.load("first", folders["few"])
    thread.join()
    assert sorted([half.place("first"), half.place("second")]) == [0, 1]


def test_without_places_a_step_is_as_it_was():
    shape = BatchShape(4, 4, 8, 1, True, "greedy")
    assert "places" not in fields(shape)
    assert list(fields(BatchShape(4, 4, 8, 1, True, "greedy", adapters=True)))[-1] == "places"


def fused(checkpoint, folder):
    sources = adaptable(checkpoint, projections(checkpoint.config))
    return {path: (a, b) for path, a, b in Adapter(folder).factors(sources, checkpoint.config, 4)}


def test_a_native_checkpoint_knows_the_names(folders, tmp_path):
    source = convert.open_checkpoint(folders["base"])
    native = convert.open_checkpoint(convert.save_native(source, tmp_path / "native", progress=False))
    expected, found = fused(source, folders["all"]), fused(native, folders["all"])
    assert expected.keys() == found.keys()
    for path, pair_ in expected.items():
        for one, other in zip(pair_, found[path], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=path)
    (tmp_path / "native" / "huggingface" / "names.json").unlink()
    with pytest.raises(ValueError, match="does not hold Hugging Face's names of its weights"):
        fused(native, folders["all"])


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({}, {"use_dora": True}, "fields not understood: 'use_dora'"),
        (
            {"lm_head.weight": np.zeros((251, 64), np.float32)},
            {},
            r"whole weights \(modules_to_save\): lm_head\.weight; merge",
        ),
        (
            {"model.embed_tokens.lora_embedding_A": np.zeros((2, 251), np.float32)}
            | {"model.embed_tokens.lora_embedding_B": np.zeros((64, 2), np.float32)},
            {},
            "changes embeddings, or inputs-first layers: model.embed_tokens",
        ),
        (
            pair("lm_head", *factors(2, 251, 64, 0)),
            {},
            r"changes lm_head\.weight, which this model does not have or keeps",
        ),
        (
            pair("model.layers.9.self_attn.q_proj", *factors(2, 80, 64, 0)),
            {},
            "for .*llama_biases: changes .*layers.9.*if that is this model, merge the adapter instead",
        ),
        (
            pair("model.layers.1.self_attn.q_proj", *factors(2, 64, 64, 0)),
            {},
            r"for .*llama_biases: .*q_proj\.weight is \[64, 64\]; the model's is \[80, 64\]",
        ),
    ],
)
def test_what_only_merging_can_do_is_refused(tensors, changes, message, folders, tmp_path):
    folder = write(tmp_path / "lora", folders["base"], [], rank=2, **changes)
    save_file({f"base_model.model.{name}": a for name, a in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        fused(convert.open_checkpoint(folders["base"]), folder)


def test_models_without_such_projections_are_refused(models, tmp_path):
    """GPT-2 stores its weights inputs first."""
    checkpoint = convert.open_checkpoint(tiny.write_checkpoint("gpt2", tmp_path))
    with pytest.raises(ValueError, match="no projection of a gpt2 model takes adapters that are kept beside it"):
        Adapters(checkpoint, checkpoint.config, {}, models("llama").mesh, dtype=np.float32, places=1, rank=1)
    with pytest.raises(ValueError, match="adapters are for a checkpoint"):
        Adapters(checkpoint.config, checkpoint.config, {}, models("llama").mesh, dtype=np.float32, places=1, rank=1)
