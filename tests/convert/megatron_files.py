"""Writes tiny checkpoints as Megatron-LM and Megatron-DeepSpeed do: a file for each rank, cut as they cut."""

import argparse

import numpy as np

from tests import tiny
from tests.convert.torch_files import write_nested

BOTH = ("weight", "bias")
PADDED = 256
"""Rows of the embedding, of which 99 or 251 are a vocabulary."""


def _pick(tensors, prefix, change=lambda array: array):
    found = {part: tensors[f"{prefix}.{part}"] for part in BOTH if f"{prefix}.{part}" in tensors}
    return {part: change(array) for part, array in found.items()}


def gpt2():
    """Hugging Face's, as plain parts: linear layers [outputs, inputs]."""
    tensors = tiny.weights("gpt2")

    def layer(prefix):
        fused = _pick(tensors, f"{prefix}.attn.c_attn", np.transpose)
        each = {part: np.split(array, 3) for part, array in fused.items()}
        return {
            "norms": [_pick(tensors, f"{prefix}.ln_1"), _pick(tensors, f"{prefix}.ln_2")],
            "qkv": [{part: arrays[index] for part, arrays in each.items()} for index in range(3)],
            "out": _pick(tensors, f"{prefix}.attn.c_proj", np.transpose),
            "up": [_pick(tensors, f"{prefix}.mlp.c_fc", np.transpose)],
            "down": _pick(tensors, f"{prefix}.mlp.c_proj", np.transpose),
        }

    return {
        "word": tensors["wte.weight"],
        "position": tensors["wpe.weight"],
        "layers": [layer(f"h.{number}") for number in range(2)],
        "final": _pick(tensors, "ln_f"),
        "kv_heads": 4,
    }


def llama(name="llama"):
    tensors = tiny.weights(name)

    def layer(prefix):
        return {
            "norms": [_pick(tensors, f"{prefix}.{which}_layernorm") for which in ("input", "post_attention")],
            "qkv": [_pick(tensors, f"{prefix}.self_attn.{which}_proj") for which in "qkv"],
            "out": _pick(tensors, f"{prefix}.self_attn.o_proj"),
            "up": [_pick(tensors, f"{prefix}.mlp.{which}_proj") for which in ("gate", "up")],
            "down": _pick(tensors, f"{prefix}.mlp.down_proj"),
        }

    return {
        "word": tensors["model.embed_tokens.weight"],
        "head": tensors["lm_head.weight"],
        "layers": [layer(f"model.layers.{number}") for number in range(3)],
        "final": _pick(tensors, "model.norm"),
        "kv_heads": 2,
    }


def padded(array):
    return np.concatenate([array, np.full((PADDED - len(array), *array.shape[1:]), 9, array.dtype)])


def _qkv(parts, kv_heads, rank, size, version):
    """What one rank has of q, k and v of all heads, in a version's order."""
    dims = parts[1].shape[0] // kv_heads
    heads = [part.reshape(kv_heads, -1, dims, *part.shape[1:]) for part in parts]
    mine = np.split(np.concatenate(heads, 1), size)[rank]  # [kv heads, queries and key and value, dims, …]
    mine = np.moveaxis(mine, 1, 0) if version == 0 else np.moveaxis(mine, 1, 2) if version == 1 else mine
    return mine.reshape(-1, *parts[0].shape[1:])


def layer_of_rank(layer, kv_heads, rank, size, version):
    """Legacy name → array."""

    def cut(array, axis=0):
        return np.split(array, size, axis)[rank]

    found = {}
    for name, norm in zip(("input_layernorm", "post_attention_layernorm"), layer["norms"]):
        found |= {f"{name}.{part}": array for part, array in norm.items()}
    for part in layer["qkv"][0]:
        arrays = [one[part] for one in layer["qkv"]]
        found[f"self_attention.query_key_value.{part}"] = _qkv(arrays, kv_heads, rank, size, version)
    for name, which in (("self_attention.dense", "out"), ("mlp.dense_4h_to_h", "down")):
        found |= {f"{name}.{part}": cut(a, 1) if part == "weight" else a for part, a in layer[which].items()}
    for part in layer["up"][0]:
        found[f"mlp.dense_h_to_4h.{part}"] = np.concatenate([cut(one[part]) for one in layer["up"]])
    return found


def legacy(model, rank, size, layers, first, last, version):
    """What one rank of a stage with the layers `layers` has under 'model'."""
    encoder = {}
    for number, layer in enumerate(layers):
        parts = layer_of_rank(layer, model["kv_heads"], rank, size, version)
        encoder |= {f"layers.{number}.{name}": array for name, array in parts.items()}
    word, found = np.split(padded(model["word"]), size)[rank], {"encoder": encoder}
    if first:
        found["embedding"] = {"word_embeddings": {"weight": word}}
        if "position" in model:
            found["embedding"]["position_embeddings"] = {"weight": model["position"]}
    if last:
        encoder |= {f"final_layernorm.{part}": array for part, array in model["final"].items()}
        if "head" in model:
            found["output_layer"] = {"weight": np.split(padded(model["head"]), size)[rank]}
        elif not first:
            return {"language_model": found, "word_embeddings_for_head": {"weight": word}}
    return {"language_model": found}


_CORE = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def core(model, rank, size, layers, first, last, version):
    """The same as Megatron core names it, with Transformer Engine's fused norms."""
    found, old = {}, legacy(model, rank, size, layers, first, last, version)["language_model"]
    for name, array in old["encoder"].items():
        stem, part = name.rsplit(".", 1)
        layer = ".".join(stem.split(".")[:2])
        ours = _CORE.get(stem.removeprefix(f"{layer}."))
        joined = "_" if ours and ours.endswith("layer_norm") else "."
        found[f"decoder.{layer}.{ours}{joined}{part}" if ours else f"decoder.{name}"] = array
    for number in range(len(layers)):
        found[f"decoder.layers.{number}.mlp.linear_fc1._extra_state"] = None
    if first:
        found["embedding.word_embeddings.weight"] = old["embedding"]["word_embeddings"]["weight"]
    if last:
        found["output_layer.weight"] = old["output_layer"]["weight"]
    return found


def write(folder, model, args, *, names=legacy, tensor=1, stages=None, version=3.0, chunks=1):
    """Write an iteration and its tracker. stages: numbers of layers in each, by chunk, then stage; None: one."""
    stages = stages or [len(model["layers"])]
    pipeline, iteration = len(stages) // chunks, folder / "iter_0000005"
    args = argparse.Namespace(**args, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    starts = np.cumsum([0, *stages])
    for rank in range(tensor):
        for stage in range(pipeline):
            values = {"args": args, "iteration": 5, "checkpoint_version": version}
            values["rng_state"] = [{"random": {1, 2}, "set": frozenset([(3, 4)]), "bytes": b"\x00\xff"}]
            for chunk in range(chunks):
                number = chunk * pipeline + stage
                layers = model["layers"][starts[number] : starts[number + 1]]
                first, last = number == 0, number == len(stages) - 1
                part = names(model, rank, tensor, layers, first, last, version)
                values["model" if chunks == 1 else f"model{chunk}"] = part
            place = f"mp_rank_{rank:02}" if pipeline == 1 else f"mp_rank_{rank:02}_{stage:03}"
            write_nested(iteration / place / "model_optim_rng.pt", values)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def write_deepspeed(folder, model, args, *, tensor=1, layers=False):
    """Write `global_step7` and its tracker. layers: a file for each layer, as with pipeline stages."""
    step, args = folder / "global_step7", argparse.Namespace(**args)
    for rank in range(tensor):
        values = {"args": args, "checkpoint_version": 3.0, "module": None, "ds_config": {"zero_optimization": 1}}
        if not layers:
            values["module"] = legacy(model, rank, tensor, model["layers"], True, True, 3.0)
            write_nested(step / f"mp_rank_{rank:02}_model_states.pt", values)
            continue
        write_nested(step / f"mp_rank_{rank:02}_model_states.pt", values)
        old = legacy(model, rank, tensor, [], True, True, 3.0)["language_model"]
        embedding = {f"{name}.weight": value["weight"] for name, value in old["embedding"].items()}
        parts = [embedding, *(layer_of_rank(one, model["kv_heads"], rank, tensor, 3.0) for one in model["layers"])]
        parts.append(model["final"])
        for number, part in zip((1, *range(3, 3 + len(model["layers"])), 9), parts):
            write_nested(step / f"layer_{number:02}-model_{rank:02}-model_states.pt", part)
    (folder / "latest").write_text("global_step7")
    return folder
