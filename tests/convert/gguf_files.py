"""Tiny GGUF files, written with the gguf package as llama.cpp's converter would."""

import gguf
import numpy as np

from tests import tiny

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(name):
    """A case's tensors under llama.cpp's names, q and k of a llama permuted for its interleaved RoPE."""
    config, tensors = tiny.CASES[name], {}
    for key, value in tiny.weights(name).items():
        module, _, kind = key.rpartition(".")
        if module in _OTHER_NAMES:
            tensors[f"{_OTHER_NAMES[module]}.{kind}"] = value
            continue
        _, _, layer, part = module.split(".", 3)
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        if heads and config["model_type"] in ("llama", "mistral"):
            split = value.reshape(config[heads], 2, -1, *value.shape[1:])
            value = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(value.shape)
        tensors[f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"] = value
    return tensors


def write_gguf(path, config, tensors, metadata=(), quantized=None):
    """Write tensors, float32 unless `quantized` says name → (type, raw rows); `metadata` is more (key, value) pairs."""
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_token_list([f"token{i}" for i in range(config["vocab_size"])])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in metadata:
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        if quantized and name in quantized:
            kind, raw = quantized[name]
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
