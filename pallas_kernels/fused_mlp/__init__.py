"""The MLP of a transformer layer: gate and up projections with their activation, down projection with its residual."""

from pallas_kernels.fused_mlp.api import down, fused_mlp, gate_up
from pallas_kernels.fused_mlp.xla import activated

__all__ = ["activated", "down", "fused_mlp", "gate_up"]
