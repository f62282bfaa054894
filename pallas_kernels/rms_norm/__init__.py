"""Root mean square normalisation, and the same of a sum that is kept."""

from pallas_kernels.rms_norm.api import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
