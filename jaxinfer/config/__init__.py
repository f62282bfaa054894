"""What a model is and how it is run: frozen records, standard library only."""

from jaxinfer.config.engine import (
    WEIGHT_FORMATS,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    Quantization,
    WeightFormat,
    at_least_one,
)
from jaxinfer.config.model import CacheGroup, ModelConfig, QueryScaling, RopeConfig

__all__ = [
    "WEIGHT_FORMATS",
    "CacheConfig",
    "CacheGroup",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "Quantization",
    "QueryScaling",
    "RopeConfig",
    "WeightFormat",
    "at_least_one",
]
