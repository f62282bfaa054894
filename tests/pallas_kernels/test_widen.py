"""The instructions that widen mxfp4 in registers, one after the other, as the PTX manual says what they do."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quant_matmul import widen


def multiply(dtype):
    """Of two pairs in words: each half by itself, rounded once."""

    def product(a, b):
        a, b = (np.array([x], np.uint32).view(dtype).astype(np.float64) for x in (a, b))
        return int((a * b).astype(dtype).view(np.uint32)[0])

    return product


OPERATIONS = {
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mov.b32": lambda a: a,
    "mul.rn.bf16x2": multiply(ml_dtypes.bfloat16),
    "mul.rn.f16x2": multiply(np.float16),
    "shfl.sync.idx.b32": lambda word, lane, *_: word,  # as if the lane that is asked were this one
}


def run(ptx, **registers):
    for statement in filter(None, (part.strip() for part in ptx.format(out="out").replace("\n", " ").split(";"))):
        name, _, operands = statement.partition(" ")
        target, *sources = (operand.strip() for operand in operands.split(","))
        registers[target] = OPERATIONS[name](*(registers[s] if s in registers else int(s, 0) for s in sources))
    return registers["out"]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_code_of_mxfp4(dtype):
    """A word holds the codes of inputs 2 c, 2 c + 1; 8 + 2 c, 9 + 2 c; and so on, of 32."""
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    snippets = widen.PTX["mxfp4", np.dtype(dtype).name]
    for code in range(16):
        codes = [(code + 3 * field) % 16 for field in range(8)]
        word = sum(value << 4 * field for field, value in enumerate(codes))
        for shift, ptx in enumerate(snippets):
            pair = np.array([run(ptx, w=word)], np.uint32).view(dtype).astype(np.float32)
            np.testing.assert_array_equal(pair, [values[codes[shift]], values[codes[shift + 4]]])


def test_every_exponent_of_mxfp4():
    for exponent in range(1, 255):
        for place in (0, 1):
            word = exponent << 8 * place | 77 << 8 * (1 - place)
            power = np.array([run(widen._POWER, w=word, base=place)], np.uint32).view(np.float32)
            assert power == np.float32(2.0) ** (exponent - 127)
