"""Every weight of a model, declared once: path → shape, logical axes, initialiser. No modules, no arrays.

The canonical shapes are what a native checkpoint stores: unpadded, unreplicated, so that any mesh restores it.
`for_tensor_parallel` gives the config whose shapes a mesh runs, and `to_physical` takes one canonical weight there.
Projections may be stored in 8 or 4 bits: `abstract` gives the shapes, `stored_axes` the logical axes.
"""

from jaxinfer.parameters.declared import (
    Parameter,
    attention_parameters,
    count,
    declare,
    dense_residual_parameters,
    head_parameter,
    latent_parameters,
    mlp_parameters,
    moe_parameters,
    norm_names,
    norm_parameters,
    recurrent_parameters,
)
from jaxinfer.parameters.layout import fitting_tensor_sizes, for_tensor_parallel, mlp_sizes, to_physical
from jaxinfer.parameters.stored import (
    Placing,
    abstract,
    abstract_parameter,
    is_quantized,
    is_stored_in,
    parts_of,
    quantized,
    resolve,
    stored_axes,
    stored_parts,
)
from jaxinfer.parameters.tree import Tree, flatten, unflatten

__all__ = [
    "Parameter",
    "Placing",
    "Tree",
    "abstract",
    "abstract_parameter",
    "attention_parameters",
    "count",
    "declare",
    "dense_residual_parameters",
    "fitting_tensor_sizes",
    "flatten",
    "for_tensor_parallel",
    "head_parameter",
    "is_quantized",
    "is_stored_in",
    "latent_parameters",
    "mlp_parameters",
    "mlp_sizes",
    "moe_parameters",
    "norm_names",
    "norm_parameters",
    "parts_of",
    "quantized",
    "recurrent_parameters",
    "resolve",
    "stored_axes",
    "stored_parts",
    "to_physical",
    "unflatten",
]
