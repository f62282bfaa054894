"""A checkpoint that says what it is told: after token t it always says successor[t].

Attention and MLP add nothing (their output projections are zero), embeddings are one-hot, and the head's row of
successor[t] is the embedding of t. So end ids, stop strings and characters split over tokens come exactly as scripted.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests import tiny

HIDDEN = 288
BOS, EOS, END = 0, 1, 2
"""`<s>`, `</s>` and `<end>`, the second end id, which only generation_config.json names."""
SPECIAL = ["<s>", "</s>", "<end>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
"""How byte-level BPE spells each byte (GPT-2)."""
VOCAB = len(SPECIAL) + 256


def byte_id(byte: int) -> int:
    return len(SPECIAL) + byte


def byte_ids(text: str) -> list[int]:
    return [byte_id(byte) for byte in text.encode()]


def successors() -> dict[int, int]:
    """a…z goes round; 0…9 ends with </s>; A says é€😀, B and <end>; X ends within a character; : says k."""
    lower, digits = byte_ids("abcdefghijklmnopqrstuvwxyz"), byte_ids("0123456789")
    symbols = [*byte_ids("Aé€😀B"), END]
    broken = [*byte_ids("X"), byte_id(0xE3), byte_id(0x81), *byte_ids("Y"), byte_id(0xF1), EOS]
    chains = [[*lower, lower[0]], [*digits, EOS], symbols, broken, byte_ids(":k"), [BOS, lower[0]]]
    return {token: after for chain in chains for token, after in itertools.pairwise(chain)} | {
        EOS: lower[0],
        END: lower[0],
    }


def write(folder: Path) -> Path:
    """The checkpoint and its byte-level tokenizer, one token a byte; BOS is added to plain prompts."""
    tiny.write_config(
        {
            **tiny.CASES["llama_one_kv_head"],
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        },
        folder,
    )
    tiny.write_safetensors(_weights(), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END]}))
    vocab = {token: i for i, token in enumerate(SPECIAL)} | {BYTE_CHARS[byte]: byte_id(byte) for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _weights() -> dict[str, np.ndarray]:
    embedding = np.eye(VOCAB, HIDDEN, dtype=np.float32)
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    for token, after in successors().items():
        head[after] += 4 * embedding[token]
    layer, ones = "model.layers.0", np.ones(HIDDEN, np.float32)
    shapes = {
        "self_attn.q_proj": (16, HIDDEN),
        "self_attn.k_proj": (8, HIDDEN),
        "self_attn.v_proj": (8, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 16),
        "mlp.gate_proj": (8, HIDDEN),
        "mlp.up_proj": (8, HIDDEN),
        "mlp.down_proj": (HIDDEN, 8),
    }
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": ones,
        f"{layer}.input_layernorm.weight": ones,
        f"{layer}.post_attention_layernorm.weight": ones,
        **{f"{layer}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
    }
