"""The MLP of a transformer layer: gate and up projections with their activation, down projection with its residual."""

from pallas_kernels.fused_mlp.api import down, fused_mlp, gate_up

__all__ = ["down", "fused_mlp", "gate_up"]
