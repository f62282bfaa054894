"""Megatron-LM's and DeepSpeed's folders: merged bit for bit, and refused where they do not fit."""

import dataclasses
import shutil

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.megatron.args import model_config
from convert.tensors import Stored
from convert.torch_pickle import Global, Opaque
from jaxinfer.config import RopeConfig
from tests import tiny
from tests.convert import megatron_files as files
from tests.convert.meshed import assert_same, load_flat
from tests.convert.torch_files import write_nested

GPT2 = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_layers": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 128,
    "max_position_embeddings": 128,
    "vocab_size": 99,
    "padded_vocab_size": 256,
    "bias_gelu_fusion": True,
    "attention_dropout": 0.1,
    "embedding_init_method_std": 0.02,
    "hidden_dropout": 0.1,
    "lr": 1e-4,
    "params_dtype": Global,  # a class, which nothing makes
}
LLAMA = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_layers": 3,
    "kv_channels": 8,
    "ffn_hidden_size": 96,
    "max_position_embeddings": 256,
    "vocab_size": 251,
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Case → (config, weights) of the Hugging Face folder."""
    found = {}
    for case in ("gpt2", "llama"):
        checkpoint = convert.open_checkpoint(tiny.write_checkpoint(case, tmp_path_factory.mktemp(case)))
        found[case] = (checkpoint.config, load_flat(checkpoint))
    return found


def assert_is(folder, case, expected):
    checkpoint = convert.open_checkpoint(folder)
    config, weights = expected[case]
    assert checkpoint.format == "megatron"
    changes = {"family": "megatron", "bos_token_id": None, "eos_token_ids": ()}
    assert checkpoint.config == dataclasses.replace(config, **changes)
    assert_same(load_flat(checkpoint), weights)
    return checkpoint


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"tensor": 4, "stages": [1, 1]}),
        ("gpt2", {"tensor": 2, "version": 0}),
        ("gpt2", {"tensor": 2, "version": 1.0}),
        ("llama", {"tensor": 2, "names": files.core}),
        ("llama", {"tensor": 2, "stages": [2, 1]}),
        ("llama", {"stages": [1, 1, 1, 0], "chunks": 2, "names": files.core}),
    ],
)
def test_ranks_are_merged(case, options, tmp_path, expected):
    model, args = {"gpt2": (files.gpt2, GPT2), "llama": (files.llama, LLAMA)}[case]
    folder = files.write(tmp_path, model(), args, **options)
    assert_is(folder, case, expected)
    assert_is(folder / "iter_0000005", case, expected)


@pytest.mark.parametrize("layers", [False, True])
def test_deepspeed_s_files_are_merged(layers, tmp_path, expected):
    folder = files.write_deepspeed(tmp_path, files.gpt2(), GPT2, tensor=2, layers=layers)
    (folder / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"not looked at")
    assert_is(folder, "gpt2", expected)


def test_only_what_a_device_needs_is_read(tmp_path, expected, monkeypatch):
    """Of a column-parallel and a row-parallel weight, half the rows and half the columns: one of two files."""
    checkpoint = convert.open_checkpoint(files.write(tmp_path, files.llama(), LLAMA, tensor=2))
    read, (_, weights) = [], expected["llama"]
    rows, columns = Stored.read, Stored.read_columns
    monkeypatch.setattr(Stored, "read", lambda s, *a: read.append(s.file.parent.name) or rows(s, *a))
    monkeypatch.setattr(Stored, "read_columns", lambda s, *a: read.append(s.file.parent.name) or columns(s, *a))
    for path, half in (
        ("layers.1.attention.qkv", np.s_[:, 1:]),
        ("layers.1.attention.out", np.s_[1:]),
        ("layers.1.mlp.gate_up", np.s_[:, :, 48:]),
        ("layers.1.mlp.down", np.s_[48:]),
    ):
        wanted = np.zeros(weights[path].shape, bool)
        wanted[half] = True
        found = checkpoint.read(path, np.float32, wanted)
        np.testing.assert_array_equal(found[half], np.asarray(weights[path])[half], err_msg=path)
    assert set(read) == {"mp_rank_01"}


def test_it_converts(tmp_path, expected):
    folder = files.write(tmp_path / "m", files.llama(), LLAMA, tensor=2)
    native = convert.save_native(convert.open_checkpoint(folder), tmp_path / "native", progress=False)
    assert_same(load_flat(convert.open_checkpoint(native)), expected["llama"][1])
    with pytest.raises(ValueError, match=r"has no config\.json.*was it GGUF or Megatron's\?"):
        convert.save_safetensors(convert.open_checkpoint(native), tmp_path / "hf", progress=False)


def test_padding_stays_where_the_vocabulary_is_not_said(tmp_path, caplog):
    args = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    checkpoint = convert.open_checkpoint(files.write(tmp_path, files.llama(), args, tensor=2))
    assert checkpoint.config.vocab_size == 256
    assert "does not say its vocabulary's size: all 256 rows" in caplog.text


ARGS = [
    ({"swiglu": False}, {"gated_mlp": False, "activation": "gelu"}),
    ({"swiglu": False, "openai_gelu": True}, {"activation": "gelu_tanh"}),
    ({"swiglu": False, "squared_relu": True}, {"activation": "relu2"}),
    ({"rotary_percent": 0.5}, {"rope": RopeConfig(10000.0, dims=4)}),
    ({"rotary_seq_len_interpolation_factor": 4}, {"rope": RopeConfig(10000.0, "linear", factor=4.0)}),
    ({"use_rope_scaling": True}, {"rope": RopeConfig(10000.0, "llama3", factor=8.0, original_max_position=8192)}),
    ({"add_qkv_bias": True, "qk_layernorm": True}, {"qkv_bias": True, "out_bias": False, "qk_norm": True}),
    ({"layernorm_zero_centered_gamma": True}, {"norm_offset": 1.0}),
    ({"position_embedding_type": "none"}, {"rope": None, "learned_positions": 0}),
    ({"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True}, {"learned_positions": 0}),
    (
        {"position_embedding_type": Opaque(Global("megatron.enums", "PositionEmbeddingType"), (3,))},
        {"rope": None, "alibi_max_bias": 8.0},
    ),
]


@pytest.mark.parametrize(("changes", "fields"), ARGS)
def test_arguments_that_change_the_model(changes, fields):
    config = model_config({**LLAMA, **changes}, 256, 3.0, "args")
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "args: 'num_experts' is 8"),
        ({"multi_latent_attention": True}, "'multi_latent_attention' is True; only None, False, 0, 0.0"),
        ({"window_size": (128, 0)}, "'window_size' is"),
        ({"softmax_type": "learnable"}, "'softmax_type' is 'learnable'"),
        ({"position_embedding_type": "mrope"}, "'position_embedding_type' is 'mrope', which is not supported"),
        ({"normalization": "ScaleNorm"}, "'normalization' is 'ScaleNorm'"),
        ({"residual_multiplier": 0.2}, "fields not understood: 'residual_multiplier'"),
        ({"rotary_new_kind": True}, "fields not understood: 'rotary_new_kind'"),
        ({"vocab_size": 300}, "'vocab_size' is 300, and the embedding has 256 rows"),
        ({"hidden_size": None}, "'hidden_size' is None; it must be a positive integer"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}, "at once are not supported"),
    ],
)
def test_arguments_that_are_not_handled_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model_config({**LLAMA, **changes}, 256, 3.0, "args")


def rank(folder, number=1):
    return folder / "iter_0000005" / f"mp_rank_{number:02}" / "model_optim_rng.pt"


def rewritten(change):
    """Damages a folder: rank 1 with its language model changed."""

    def damage(folder):
        model = files.legacy(files.llama(), 1, 2, files.llama()["layers"], True, True, 3.0)
        change(model["language_model"])
        write_nested(rank(folder), {"args": {}, "checkpoint_version": 3.0, "model": model})

    return damage


def with_layer(**tensors):
    return rewritten(lambda model: model["encoder"].update({f"layers.0.mlp.{n}.weight": a for n, a in tensors.items()}))


def touch(name):
    return lambda folder: (folder / "iter_0000005" / name).touch()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: rank(f).unlink(), FileNotFoundError, r"of 2 x 1 files like mp_rank_00.* missing.* 1 and 0"),
        (lambda f: shutil.rmtree(rank(f).parent), FileNotFoundError, "model_parallel_size 2, and holds files for 1"),
        (
            with_layer(dense_4h_to_h=np.zeros((64, 40))),
            ValueError,
            r"the ranks do not agree about layers\.0\.fc2\.weight: F32 \[64, 48\], F64 \[64, 40\]",
        ),
        (rewritten(lambda m: m.pop("output_layer")), ValueError, r"only 1 of 2 ranks hold head\.weight"),
        (with_layer(lora=np.zeros(2, np.float32)), ValueError, r"not all ranks hold .*layers\.0\.mlp\.lora\.weight"),
        (
            with_layer(dense_4h_to_h={1, 2}),
            ValueError,
            r"not tensors: .*layers\.0\.mlp\.dense_4h",
        ),
        (
            lambda f: write_nested(rank(f, 0), {"model": {}}),
            ValueError,
            "holds no arguments of Megatron-LM's",
        ),
        (lambda f: write_nested(rank(f, 0), {"args": {}}), ValueError, "holds no 'model', where the weights should be"),
        (touch(".metadata"), ValueError, r"distributed format \(torch_dist\)"),
        (
            touch("zero_pp_rank_0_mp_rank_00_model_states.pt"),
            ValueError,
            r"ZeRO 3 has cut up the weights.*run the zero_to_fp32\.py",
        ),
    ],
)
def test_folders_that_do_not_fit_are_refused(damage, error, message, tmp_path):
    folder = files.write(tmp_path, files.llama(), LLAMA, tensor=2)
    damage(folder)
    with pytest.raises(error, match=message):
        convert.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("tracker", "named", "there"),
    [
        ("latest_checkpointed_iteration.txt", "600", "iter_0000500"),
        ("latest", "global_step600", "global_step500"),
    ],
)
def test_a_tracker_that_names_what_is_not_there(tracker, named, there, tmp_path):
    (tmp_path / tracker).write_text(named)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        convert.open_checkpoint(tmp_path)
    (tmp_path / there).mkdir()
    with pytest.raises(FileNotFoundError, match=f"{tracker} names '{named}', and there is no .*6.* there: {there}"):
        convert.open_checkpoint(tmp_path)


def test_an_optimizer_s_state_alone_is_refused(tmp_path):
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(FileNotFoundError, match=r"no weights by themselves; run the zero_to_fp32\.py"):
        convert.open_checkpoint(tmp_path)


def test_tensors_that_the_arguments_do_not_say_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"missing tensors: layers\.0\.qkv\.bias"):
        convert.open_checkpoint(files.write(tmp_path, files.llama(), {**LLAMA, "add_qkv_bias": True}))


def test_nothing_is_called(tmp_path):
    """An object whose pickle runs a command is only a record of that."""
    mark = tmp_path / "was-run"

    class Payload:
        def __reduce__(self):
            return __import__("os").system, (f"touch {mark}",)

    folder = files.write(tmp_path / "m", files.llama(), {**LLAMA, "timers": Payload()})
    assert convert.open_checkpoint(folder).dtype == "float32"
    assert not mark.exists()


def test_bfloat16(tmp_path):
    model = files.llama()
    model["layers"] = [_as_bfloat16(layer) for layer in model["layers"]]
    model |= {name: _as_bfloat16(model[name]) for name in ("word", "head", "final")}
    assert convert.open_checkpoint(files.write(tmp_path, model, LLAMA, tensor=2)).dtype == "bfloat16"


def _as_bfloat16(value):
    if isinstance(value, dict):
        return {name: _as_bfloat16(inner) for name, inner in value.items()}
    return [_as_bfloat16(inner) for inner in value] if isinstance(value, list) else value.astype(ml_dtypes.bfloat16)
