"""One composable decoder; families differ by their ModelConfig alone."""

from jaxinfer.models.decoder import Decoder

__all__ = ["Decoder"]
