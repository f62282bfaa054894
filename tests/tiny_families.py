"""Tiny random checkpoints of the families: what differs from Llama is in each. Random norms, biases and positions.

Names and shapes of the tensors come from our own tables; that they are those of the family is what transformers says,
which loads each of these checkpoints strictly when scripts/make_goldens.py has it compute the golden, or, where it
lacks the family, scripts/plain_models.py.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from convert.families import FAMILIES, model_config
from jaxinfer.config import ModelConfig
from jaxinfer.parameters import Parameter, declare, flatten
from tests.tiny_dense import DENSE, ENCODERS
from tests.tiny_experts import EXPERTS

CASES: dict[str, dict[str, Any]] = {**DENSE, **EXPERTS}
"""Name → the checkpoint's config.json. Tensor parallel 1 and 2 fit them all."""

NOT_IN_TRANSFORMERS = ("arctic", "baichuan")
"""What their checkpoints compute is what scripts/plain_models.py says."""

BARE = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt", *ENCODERS)
"""Families whose checkpoints here have names as without a head."""

SAME_AS = {
    "camembert": "roberta",
    "chatglm": "glm",
    "gemma3": "gemma3_text",
    "internlm2": "llama",
    "internlm3": "llama",
    "llama4": "llama4_text",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "mistral3": "ministral3",
    "xlm-roberta": "roberta",
}
"""Families without a checkpoint here → that whose arrays they hold, under other names."""


def weights(name: str) -> dict[str, np.ndarray]:
    """The float32 tensors of a case under their Hugging Face names."""
    config = model_config(CASES[name] if name in CASES else ENCODERS[name])
    table = FAMILIES[config.family].rows(config, ("bare",) if config.family in BARE else ())
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    tensors = {}
    for path, parameter in flatten(declare(config)):
        source = table[_generic(path)].of_layer(path.split(".")[1], config)
        slots = source.transform(np.broadcast_to(np.uint8(0), parameter.shape), config)
        for tensor, slot in zip(source.names, slots, strict=True):
            tensors[tensor] = _random(rng, path, parameter, slot.shape, config)
    return tensors


def _generic(path: str) -> str:
    return ".".join("{}" if part.isdigit() else part for part in path.split("."))


def _random(
    rng: np.random.Generator, path: str, parameter: Parameter, shape: tuple[int, ...], config: ModelConfig
) -> np.ndarray:
    """Norms around one, and the rest so large that logits vary and attention is far from uniform.

    A tied head is small and the last norm large, or every token would predict itself.
    """
    small = 2.0 * config.embedding_scale if config.tied_head and config.final_norm else 1.0
    if path.endswith("norm.scale"):
        first = 2.0 if config.bidirectional else 0.5
        gain = {"final_norm.scale": 2.0 if config.head_norm else small, "embed_norm.scale": first}.get(path, 1.0)
        return (gain * (0.5 + rng.random(shape)) - config.norm_offset).astype(np.float32)
    std = 0.3
    if "bias" not in path:
        fan_in = parameter.inputs if parameter.contract else parameter.fan_in
        std = fan_in**-0.5 * next((gain for part, gain in _GAINS.items() if part in path), 1.0)
        std = std / small if path == "embed.weight" else std
    return (rng.random(shape) * 2 - 1).astype(np.float32) * np.float32(std * 3**0.5)


_GAINS = {"router": 3.0, "embed": 2.0, "positions": 1.0, "qkv": 1.4, "up": 1.4, "out": 1.5, "down": 1.5, "head": 2.0}
