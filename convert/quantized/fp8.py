"""fp8 with scales beside it, as DeepSeek, Qwen and AutoFP8 store it.

Of a projection X: X.weight [outputs, inputs] float8_e4m3fn, and X.weight_scale_inv, one for each block of
`weight_block_size` = [rows, columns], the last ones cut off; or X.weight_scale, one for the weight or for each
output. In spite of the name, weight = stored · scale in both.
"""

from __future__ import annotations

from convert.families.fields import Fields
from convert.quantized.layer import Packed, Rows, part, read_float
from convert.quantized.packing import FLOAT_SCALES
from convert.quantized.scaled import block_of, follows_of, is_block, low_bit, scaled_rows, two_dimensional
from convert.tensors import Reader

NO_EFFECT = """
    activation_scheme dequantize ignored_layers kv_cache_quant_method kv_cache_scheme modules_to_not_convert scale_fmt
"""
_SUFFIXES = ("_scale_inv", "_scale")


def find(reader: Reader, fields: Fields) -> list[Packed]:
    """Every projection that is stored so."""
    fields.expect("fmt", "e4m3", "float8_e4m3fn", None)
    size = fields.get("weight_block_size")
    if size is not None and not is_block(size):
        raise ValueError(f"{fields.where}: 'weight_block_size' is {size!r}; it must be two positive integers")
    stored = [name for name, info in reader.tensors.items() if info.dtype == "F8_E4M3"]
    return [_packed(reader, name, tuple(size) if size else None) for name in stored]


def _packed(reader: Reader, name: str, block: tuple[int, int] | None) -> Packed:
    shape = part(reader, name, ("F8_E4M3",), (None, None)).shape
    scale = next((name + suffix for suffix in _SUFFIXES if name + suffix in reader.tensors), name + _SUFFIXES[0])
    size = two_dimensional(part(reader, scale, (*FLOAT_SCALES, "F8_E8M0")).shape)
    if block is None or not scale.endswith("_inv"):
        block = block_of(shape, size, scale)
    if size != (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
        raise ValueError(f"{scale} is {list(size)}, which does not fit blocks of {list(block)} of {list(shape)}")

    def open_() -> Rows:
        return scaled_rows(reader, name, read_float(reader, scale).reshape(size), None, block)

    low = low_bit(reader, name, lambda: read_float(reader, scale), size)
    return Packed(name, shape, "fp8", (name, scale), open_, low, follows_of(reader, name, (scale,), block))
