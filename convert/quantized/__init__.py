"""Checkpoints that others quantized: every format as a layer over a reader, which gives the weights as floats.

A family's table asks for `X.weight`; where the file holds `X.qweight`, `X.scales` and so on instead, the layer presents
`X.weight` in their place and makes its rows when they are read. A format is a module with `find`; they are listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from convert.families.fields import Fields
from convert.quantized import awq, bitsandbytes, compressed, fp8, gptq, mxfp4
from convert.quantized.layer import DequantizingReader, Packed, PartialReader
from convert.tensors import Reader


class Method(Protocol):
    """A module of a format."""

    NO_EFFECT: str
    """Fields that may say anything: what they say changes nothing, or the tensors say it as well."""

    def find(self, reader: Reader, fields: Fields) -> list[Packed]:
        """Every weight that is stored so."""
        ...


METHODS: dict[str, Method] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
}
"""By `quant_method` of a config's `quantization_config`."""

_UNUSED = tuple(
    f".{tensor}_{kind}" for tensor in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point", "g_idx")
)
"""Ends of names: how activations and the cache were rounded. Here they are rounded otherwise, or not at all."""


def dequantized(reader: Reader, config: Mapping[str, Any] | None, where: str) -> Reader:
    """The reader with every packed weight presented as one of floats; itself if `config`, the model's
    `quantization_config`, is None.

    Raises ValueError for a method that is not supported, settings that are not known or contradict each other or the
    tensors, and tensors that are missing or do not fit each other.
    """
    if config is None:
        return reader
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}: 'quantization_config' is {config!r}; it must be an object")
    fields = Fields(config, f"{where}: quantization_config")
    method = fields.choice("quant_method", fields.get("quant_method"), METHODS)
    partial = PartialReader(reader)
    packed = method.find(partial, fields)
    fields.ignore((*method.NO_EFFECT.split(), *(name for name, value in config.items() if not value)))  # what is off
    fields.finish()
    if not packed:
        raise ValueError(f"{where}: 'quantization_config' says {config['quant_method']}, but no weight is stored so")
    return DequantizingReader(partial, packed, [name for name in reader.tensors if name.endswith(_UNUSED)])
