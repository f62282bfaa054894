"""4-bit weights made with the help of a text, rather than each rounded to its nearest.

calibrated(checkpoint, file, …) → Ready           what `python -m convert --calibrate` takes     calibrate.py
calibrate(checkpoint, ids, quantization, ready)   the projections of a checkpoint, by layers     calibrate.py
calibrate_experts(rows, …)                        those of a layer's experts                     experts.py
gptq(weight, second_moment, quantization)         one of them                                    gptq.py
Ready(folder)                                     quantized weights that wait on disk            ready.py
"""

from jaxinfer.calibration.calibrate import MIN_TOKENS, calibrate, calibrated, read_ids
from jaxinfer.calibration.gptq import gptq
from jaxinfer.calibration.ready import Ready

__all__ = ["MIN_TOKENS", "Ready", "calibrate", "calibrated", "gptq", "read_ids"]
