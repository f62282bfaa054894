"""Every weight of a model, declared once: path → shape, logical axes, initialiser. No modules, no arrays.

The canonical shapes are what a native checkpoint stores: unpadded, unreplicated, so that any mesh restores it.
`for_tensor_parallel` gives the config whose shapes a mesh runs, and `to_physical` takes one canonical weight there.
Projections may be stored in 8 or 4 bits: `abstract` gives the shapes, `stored_axes` the logical axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.config import ModelConfig, Quantization

if TYPE_CHECKING:
    from pallas_kernels.formats import QuantizedArray

Tree = dict[Any, Any]
"""A nested dict; layers are keyed by their number. The tree's keys are the attributes of the modules in `models`."""
type Placing = Callable[[tuple[str | None, ...]], Any]
"""The sharding of an array with these logical axes."""


@dataclass(frozen=True)
class Parameter:
    """One weight: its shape, the logical axis of each dimension (None: never sharded) and how it starts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initialiser: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1
    """Inputs summed into one output: a normal weight starts with standard deviation fan_in ** -0.5."""
    contract: int = 0
    """Leading dimensions that a projection sums over; 0: no projection, so never quantized."""

    @property
    def inputs(self) -> int:
        """Of a projection: its input dimensions flattened."""
        return math.prod(self.shape[: self.contract])


def declare(config: ModelConfig) -> Tree:
    """All weights of `config` as a nested dict of Parameter."""
    c, norm = config, {"scale": Parameter((config.hidden_size,), ("embed",), "ones")}
    layer = {
        "attention_norm": norm,
        "attention": attention_parameters(c),
        "mlp_norm": norm,
        "mlp": mlp_parameters(c),
    }
    tree: Tree = {
        "embed": {"weight": Parameter((c.vocab_rows, c.hidden_size), ("vocab", "embed"), fan_in=c.hidden_size)},
        "layers": dict.fromkeys(range(c.num_layers), layer),
        "final_norm": norm,
    }
    if not c.tied_head:
        tree["head"] = {"weight": head_parameter(c)}
    return tree


def head_parameter(c: ModelConfig) -> Parameter:
    """Of an untied model."""
    return Parameter((c.hidden_size, c.vocab_rows), ("embed", "vocab"), fan_in=c.hidden_size, contract=1)


def attention_parameters(c: ModelConfig) -> Tree:
    """Of one layer. qkv holds, per kv head, its query heads, then its key, then its value: a shard is a plain slice."""
    heads = (c.num_kv_heads, c.q_per_kv + 2, c.head_dim)
    tree: Tree = {
        "qkv": Parameter(
            (c.hidden_size, *heads), ("embed", "kv_heads", None, "head_dim"), fan_in=c.hidden_size, contract=1
        ),
        "out": Parameter(
            (c.num_kv_heads, c.q_per_kv, c.head_dim, c.hidden_size),
            ("kv_heads", None, "head_dim", "embed"),
            fan_in=c.num_heads * c.head_dim,
            contract=3,
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


def mlp_parameters(c: ModelConfig) -> Tree:
    """Of one layer."""
    tree: Tree = {
        "gate_up": Parameter((c.hidden_size, 2, c.mlp_size), ("embed", None, "mlp"), fan_in=c.hidden_size, contract=1),
        "down": Parameter((c.mlp_size, c.hidden_size), ("mlp", "embed"), fan_in=c.mlp_size, contract=1),
    }
    if c.mlp_bias:
        tree["gate_up_bias"] = Parameter((2, c.mlp_size), (None, "mlp"), "zeros")
        tree["down_bias"] = Parameter((c.hidden_size,), ("embed",), "zeros")
    return tree


def is_stored_in(parameter: Parameter, quantization: Quantization | None) -> bool:
    """Whether this weight is quantized: projections are, and the head in 8 bits, which its many outputs can bear."""
    if quantization is None or not parameter.contract:
        return False
    return "vocab" not in parameter.axes or quantization.format != "int4"


def resolve(config: ModelConfig, quantization: Quantization | None) -> Quantization | None:
    """The quantization with its group size. Raises ValueError if groups do not divide the projections' inputs."""
    if quantization is None or quantization.format != "int4":
        return quantization
    from pallas_kernels.formats import GROUP_SIZES

    each = sorted({p.inputs for _, p in flatten(declare(config)) if is_stored_in(p, quantization)})
    fitting = [size for size in sorted(GROUP_SIZES, reverse=True) if all(inputs % size == 0 for inputs in each)]
    size = quantization.group_size
    if not fitting or size not in (None, *fitting):
        inputs = ", ".join(map(str, each))
        raise ValueError(
            f"int4 in groups of {'any size' if size is None else size} does not fit projections of {inputs} inputs; "
            f"group sizes that fit: {', '.join(map(str, fitting)) or 'none; use int8'}"
        )
    return dataclasses.replace(quantization, group_size=fitting[0] if size is None else size)


def abstract(
    config: ModelConfig,
    dtype: Any,
    sharding: Callable[[tuple[str | None, ...]], Any],
    quantization: Quantization | None,
) -> Tree:
    """A jax.ShapeDtypeStruct, or a QuantizedArray of them, for every weight.

    quantization: as `resolve` gives it.
    """
    return unflatten(
        {
            path: abstract_parameter(parameter, dtype, sharding, quantization)
            for path, parameter in flatten(declare(config))
        }
    )


def abstract_parameter(parameter: Parameter, dtype: Any, sharding: Placing, quantization: Quantization | None) -> Any:
    """One leaf of `abstract`."""
    import jax  # late: opening a checkpoint does without

    if not is_stored_in(parameter, quantization):
        return jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=sharding(parameter.axes))
    shapes = _quantized_shapes(parameter, dtype, quantization)
    axes = stored_axes(parameter, shapes)
    parts: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=sharding(axes[name]))
        for name, part in parts_of(shapes).items()
    }
    return dataclasses.replace(shapes, **parts)


@functools.cache
def _quantized_shapes(parameter: Parameter, dtype: Any, quantization: Quantization | None) -> QuantizedArray:
    import jax

    weight = jax.ShapeDtypeStruct(parameter.shape, dtype)
    return jax.eval_shape(lambda weight: quantized(weight, parameter, quantization), weight)


def quantized(weight: Any, parameter: Parameter, quantization: Quantization | None) -> QuantizedArray:
    """A canonical or laid-out array of this parameter in 8 or 4 bits; traces under jit."""
    from pallas_kernels.formats import quantize

    assert quantization is not None
    options = {"group_size": quantization.group_size} if quantization.group_size else {}
    return quantize(
        weight, quantization.format, contract=parameter.contract, symmetric=quantization.symmetric, **options
    )


def stored_axes(parameter: Parameter, weight: QuantizedArray) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of each part of a quantized weight: outputs keep theirs, the inputs take the first of theirs."""
    outputs = parameter.axes[parameter.contract :]
    whole = (*outputs, parameter.axes[0])
    return {name: whole[: part.ndim] for name, part in parts_of(weight).items()}


def is_quantized(weight: Any) -> bool:
    """Whether it is a QuantizedArray, without importing that."""
    return hasattr(weight, "scales")


def parts_of(weight: QuantizedArray) -> dict[str, Any]:
    """The arrays of a quantized weight by name: values, scales, and zeros where it has them."""
    parts = {name: getattr(weight, name) for name in ("values", "scales", "zeros")}
    return {name: part for name, part in parts.items() if part is not None}


def stored_parts(path: str, weight: Any) -> dict[str, Any]:
    """The arrays of a weight by their names in a native checkpoint: one at `path`, or a quantized one's below it."""
    if not is_quantized(weight):
        return {path: weight}
    return {f"{path}.{name}": part for name, part in parts_of(weight).items()}


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


def to_physical(path: str, weight: Any, config: ModelConfig, physical: ModelConfig) -> Any:
    """A canonical weight in the shape that `physical`, from `for_tensor_parallel`, declares.

    weight: an array (numpy or jax), or a QuantizedArray. Only methods and slices are used, so that it also traces under
    jit, where the result can be sharded.
    """
    if is_quantized(weight):  # [*outputs, inputs]
        parts = {name: _lay_out(path, part, 0, config, physical) for name, part in parts_of(weight).items()}
        return dataclasses.replace(weight, **parts)
    if path.endswith(".out"):  # the query heads of a kv head, split over its copies: the order does not change
        return weight.reshape(physical.num_kv_heads, physical.q_per_kv, config.head_dim, config.hidden_size)
    return _lay_out(path, weight, 1 if path.endswith((".qkv", "head.weight")) else 0, config, physical)


def _lay_out(path: str, array: Any, axis: int, config: ModelConfig, physical: ModelConfig) -> Any:
    """axis: that of the vocabulary, or of the kv heads, whose query heads, key and value follow."""
    xp, leaf = array.__array_namespace__(), path.rpartition(".")[2]
    if path in ("embed.weight", "head.weight") and physical.vocab_padding:
        widths = [(0, physical.vocab_padding if dim == axis else 0) for dim in range(array.ndim)]
        return xp.pad(array, widths)
    copies = physical.num_kv_heads // config.num_kv_heads
    if copies == 1 or leaf not in ("qkv", "qkv_bias"):
        return array
    lead, after, skip = array.shape[:axis], array.shape[axis + 2 :], (slice(None),) * (axis + 1)
    queries = array[*skip, : config.q_per_kv].reshape(*lead, physical.num_kv_heads, physical.q_per_kv, *after)
    keys_values = xp.repeat(array[*skip, config.q_per_kv :], copies, axis=axis)
    return xp.concatenate([queries, keys_values], axis=axis + 1)
