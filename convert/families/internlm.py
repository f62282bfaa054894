"""InternLM2 (Llama with queries, keys and values in one tensor, under names of its own) and InternLM3 (Llama)."""

from __future__ import annotations

from convert import transforms
from convert.families.decoder import LLAMA_TABLE, common_fields, norm_rows
from convert.families.fields import Fields
from convert.families.table import Family, Source
from convert.joined import grouped_qkv
from jaxinfer.config import ModelConfig

_INTERNLM2 = {
    "vocab_size": 103168,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_INTERNLM3 = {
    **_INTERNLM2,
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "norm_eps": 1e-5,
    "head_dim": 128,
}


def _internlm2(fields: Fields) -> ModelConfig:
    fields.expect("bias", False)
    fields.expect("pretraining_tp", 1)
    return ModelConfig(family="internlm2", **common_fields(fields, _INTERNLM2))


def _internlm3(fields: Fields) -> ModelConfig:
    for name in ("bias", "qkv_bias", "attention_bias", "mlp_bias"):
        fields.expect(name, False)
    return ModelConfig(family="internlm3", **common_fields(fields, _INTERNLM3))


_LAYER = "model.layers.{}"

INTERNLM2 = Family(
    _internlm2,
    {
        "embed.weight": Source(("model.tok_embeddings.weight",), transforms.whole),
        **norm_rows("layers.{}.attention_norm", f"{_LAYER}.attention_norm"),
        "layers.{}.attention.qkv": Source((f"{_LAYER}.attention.wqkv.weight",), grouped_qkv),
        "layers.{}.attention.out": Source((f"{_LAYER}.attention.wo.weight",), transforms.attention_out),
        **norm_rows("layers.{}.mlp_norm", f"{_LAYER}.ffn_norm"),
        "layers.{}.mlp.gate_up": Source(
            (f"{_LAYER}.feed_forward.w1.weight", f"{_LAYER}.feed_forward.w3.weight"), transforms.fused_gate_up
        ),
        "layers.{}.mlp.down": Source((f"{_LAYER}.feed_forward.w2.weight",), transforms.transposed),
        **norm_rows("final_norm", "model.norm"),
        "head.weight": Source(("output.weight",), transforms.transposed),
    },
)
INTERNLM3 = Family(_internlm3, LLAMA_TABLE)
