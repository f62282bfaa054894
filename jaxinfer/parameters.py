"""Every weight of a model, declared once: path → shape, logical axes, initialiser. No modules, no arrays.

The canonical shapes are what a native checkpoint stores: unpadded, unreplicated, so that any mesh restores it.
`for_tensor_parallel` gives the config whose shapes a mesh runs, and `to_physical` takes one canonical array there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.config import ModelConfig

Tree = dict[Any, Any]
"""A nested dict; layers are keyed by their number. The tree's keys are the attributes of the modules in `models`."""


@dataclass(frozen=True)
class Parameter:
    """One weight: its shape, the logical axis of each dimension (None: never sharded) and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initialiser: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1
    """Inputs summed into one output: a normal weight starts with standard deviation fan_in ** -0.5."""


def declare(config: ModelConfig) -> Tree:
    """All weights of `config` as a nested dict of Parameter."""
    c, norm = config, {"scale": Parameter((config.hidden_size,), ("embed",), "ones")}
    tree: Tree = {
        "embed": {"weight": Parameter((c.vocab_rows, c.hidden_size), ("vocab", "embed"), fan_in=c.hidden_size)},
        "layers": {
            layer: {"attention_norm": norm, "attention": _attention(c), "mlp_norm": norm, "mlp": _mlp(c)}
            for layer in range(c.num_layers)
        },
        "final_norm": norm,
    }
    if not c.tied_head:
        tree["head"] = {"weight": Parameter((c.hidden_size, c.vocab_rows), ("embed", "vocab"), fan_in=c.hidden_size)}
    return tree


def _attention(c: ModelConfig) -> Tree:
    """qkv holds, per kv head, its query heads, then its key, then its value: a shard by kv head is a plain slice."""
    heads = (c.num_kv_heads, c.q_per_kv + 2, c.head_dim)
    tree: Tree = {
        "qkv": Parameter((c.hidden_size, *heads), ("embed", "kv_heads", None, "head_dim"), fan_in=c.hidden_size),
        "out": Parameter(
            (c.num_kv_heads, c.q_per_kv, c.head_dim, c.hidden_size),
            ("kv_heads", None, "head_dim", "embed"),
            fan_in=c.num_heads * c.head_dim,
        ),
    }
    if c.qkv_bias:
        tree["qkv_bias"] = Parameter(heads, ("kv_heads", None, "head_dim"), "zeros")
    if c.out_bias:
        tree["out_bias"] = Parameter((c.hidden_size,), ("embed",), "zeros")
    if c.qk_norm:
        tree["q_norm"] = {"scale": Parameter((c.head_dim,), ("head_dim",), "ones")}
        tree["k_norm"] = {"scale": Parameter((c.head_dim,), ("head_dim",), "ones")}
    return tree


def _mlp(c: ModelConfig) -> Tree:
    tree: Tree = {
        "gate_up": Parameter((c.hidden_size, 2, c.mlp_size), ("embed", None, "mlp"), fan_in=c.hidden_size),
        "down": Parameter((c.mlp_size, c.hidden_size), ("mlp", "embed"), fan_in=c.mlp_size),
    }
    if c.mlp_bias:
        tree["gate_up_bias"] = Parameter((2, c.mlp_size), (None, "mlp"), "zeros")
        tree["down_bias"] = Parameter((c.hidden_size,), ("embed",), "zeros")
    return tree


def flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf in tree order, a path reading like `layers.3.attention.qkv`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def unflatten(leaves: dict[str, Any]) -> Tree:
    """The nested dict of path → leaf; layer numbers become integers again."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def count(config: ModelConfig) -> int:
    """Number of weights."""
    total = 0
    for _, parameter in flatten(declare(config)):
        size = 1
        for dim in parameter.shape:
            size *= dim
        total += size
    return total


def for_tensor_parallel(config: ModelConfig, tensor: int) -> ModelConfig:
    """The same model in shapes that `tensor` shards divide: kv heads replicated where too few, vocabulary padded.

    Raises ValueError, naming the sizes that fit, if the heads or the MLP do not divide.
    """
    c = config
    if c.vocab_padding:
        raise ValueError("the config is already laid out for a mesh; start from the canonical one")
    if tensor not in fitting_tensor_sizes(c):
        fitting = ", ".join(map(str, fitting_tensor_sizes(c)))
        raise ValueError(
            f"tensor_parallel_size {tensor} does not fit {c.num_heads} query heads, {c.num_kv_heads} kv heads and "
            f"an MLP of {c.mlp_size}; sizes that fit: {fitting}"
        )
    return dataclasses.replace(c, num_kv_heads=max(c.num_kv_heads, tensor), vocab_padding=-c.vocab_size % tensor)


def fitting_tensor_sizes(config: ModelConfig) -> list[int]:
    """Sizes that divide the kv heads, or are a multiple of them that divides the query heads; and divide the MLP."""
    c = config
    return [
        size
        for size in range(1, c.num_heads + 1)
        if (c.num_kv_heads % size == 0 or (size % c.num_kv_heads == 0 and c.num_heads % size == 0))
        and c.mlp_size % size == 0
    ]


def to_physical(path: str, array: Any, config: ModelConfig, physical: ModelConfig) -> Any:
    """A canonical array (numpy or jax) in the shape that `physical`, from `for_tensor_parallel`, declares.

    Only methods and slices are used, so that it also traces under jit, where the result can be sharded.
    """
    xp = array.__array_namespace__()
    leaf = path.rpartition(".")[2]
    if path in ("embed.weight", "head.weight") and physical.vocab_padding:
        axis = 0 if path == "embed.weight" else 1
        widths = [(0, physical.vocab_padding if dim == axis else 0) for dim in range(2)]
        return xp.pad(array, widths)
    copies = physical.num_kv_heads // config.num_kv_heads
    if copies == 1 or leaf not in ("qkv", "qkv_bias", "out"):
        return array
    if leaf == "out":  # the query heads of a kv head, split over its copies: the order does not change
        return array.reshape(physical.num_kv_heads, physical.q_per_kv, config.head_dim, config.hidden_size)
    *lead, _, _, head_dim = array.shape
    queries = array[..., : config.q_per_kv, :].reshape(*lead, physical.num_kv_heads, physical.q_per_kv, head_dim)
    keys_values = xp.repeat(array[..., config.q_per_kv :, :], copies, axis=-3)
    return xp.concatenate([queries, keys_values], axis=-2)
