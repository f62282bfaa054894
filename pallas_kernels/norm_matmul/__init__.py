"""RMSNorm and the projection behind it."""

from pallas_kernels.norm_matmul.api import norm_gate_up, norm_projection
from pallas_kernels.rms_norm.fold import Norm

__all__ = ["Norm", "norm_gate_up", "norm_projection"]
