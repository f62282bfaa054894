"""Weights of 8 or 4 bits to 16-bit floats in registers, as wgmma takes its first operand.

A thread of a matrix unit's warpgroup takes, of 16 inputs of an output, four: 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c, c being
its place among four. 8-bit weights are loaded two at a time; 4-bit weights in words that hold all such of 32 inputs
(`formats.pack_int4`). Values are exact: the instructions put the bits of an integer under the exponent of a power of
two, and subtract.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.formats import Format, e2m1, e8m0, unpack_int4

ROWS = 64
"""Outputs a warpgroup takes: those of one wgmma."""
WG = plgpu.Layout.WGMMA
PER_ROW = WG.reduce(1)
EXPONENT = 0x43
"""Of int8 on the way to bf16."""
OFFSET = {"bfloat16": 136.0, "float16": 1032.0}
"""What a 4-bit value, stored plus 8, has been raised by once it is a 16-bit float."""

PTX: dict[tuple[str, str], list[str]] = {
    ("int8", "bfloat16"): [
        "prmt.b32 t, w, base, 0x4140; and.b32 u, t, 0xff80ff80; and.b32 t, t, 0xff7fff7f; sub.rn.bf16x2 {out}, t, u;"
    ],
    ("int8", "float16"): [
        "xor.b32 t, w, 0x8080; prmt.b32 t, t, 0x64, 0x4140; mov.b32 u, 0x64806480; sub.rn.f16x2 {out}, t, u;"
    ],
    ("fp8", "bfloat16"): [
        "prmt.b32 t, w, 0, 0x1404; shr.u32 u, t, 4; and.b32 u, u, 0x07f007f0; lop3.b32 t, t, 0x80008000, u, 0xea;"
        "mov.b32 u, 0x7b807b80; mul.rn.bf16x2 {out}, t, u;"
    ],
    ("fp8", "float16"): ["cvt.u16.u32 h, w; cvt.rn.f16x2.e4m3x2 {out}, h;"],
    ("int4", "bfloat16"): [
        f"shr.u32 t, w, {shift}; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; sub.rn.bf16x2 {{out}}, t, base;"
        for shift in (0, 4, 8, 12)
    ],
    ("int4", "float16"): [
        f"shr.u32 t, w, {shift}; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; sub.rn.f16x2 {{out}}, t, base;"
        for shift in (0, 4, 8, 12)
    ],
    ("mxfp4", "bfloat16"): [
        f"shr.u32 t, w, {shift}; and.b32 u, t, 0x00080008; and.b32 t, t, 0x00070007; shl.b32 u, u, 12; shl.b32 t, t, 6;"
        "or.b32 t, t, u; mov.b32 u, 0x7e807e80; mul.rn.bf16x2 {out}, t, u;"
        for shift in (0, 4, 8, 12)
    ],
    ("mxfp4", "float16"): [
        f"shr.u32 t, w, {shift}; and.b32 u, t, 0x00080008; and.b32 t, t, 0x00070007; shl.b32 u, u, 12; shl.b32 t, t, 9;"
        "or.b32 t, t, u; mov.b32 u, 0x74007400; mul.rn.f16x2 {out}, t, u;"
        for shift in (0, 4, 8, 12)
    ],
}
"""From what a thread loads at once, `w`, to pairs of neighbouring inputs, a register each. fp8 to bf16: the sign stays,
the rest moves down to bf16's exponent and mantissa, and 2 ** 120 makes up for the exponents' different bias; mxfp4
likewise, by 2 ** 126, or 2 ** 14 for float16."""
_COLUMN = """
shr.u32 t, base, 1; shfl.sync.idx.b32 t, w, t, 0x1c1f, 0xffffffff;
and.b32 u, base, 1; shl.b32 u, u, 4; shr.u32 {out}, t, u;"""
_POWER = """
shr.u32 t, base, 1; shfl.sync.idx.b32 t, w, t, 0x1c1f, 0xffffffff;
and.b32 u, base, 1; shl.b32 u, u, 3; shr.u32 t, t, u; and.b32 t, t, 0xff; shl.b32 {out}, t, 23;"""
"""The same of bytes, which are exponents of float32."""


def layout(format: Format) -> plgpu.Layout:
    """In which a tile of stored weights is loaded."""
    return plgpu.Layout.WGMMA_8BIT if _per_byte(format) == 2 else WG


def _per_byte(format: Format) -> int:
    return 2 if format in ("int4", "mxfp4") else 1


def widen(
    tile: jax.Array,
    format: Format,
    dtype: Any,
    *,
    first: int,
    inputs: int,
    zeros: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """`inputs` inputs of a tile, from `first` on: [64, inputs] in `dtype`, bf16 or f16.

    tile: [64, bytes] in `layout`; zeros: [64] f32, the int4 value that stands for 0, or None.
    """
    per_byte = _per_byte(format)
    if interpret is not None:
        tile = tile[:, first // per_byte : (first + inputs) // per_byte]
        if per_byte == 1:
            return tile.astype(dtype)
        if format == "mxfp4":
            return e2m1(unpack_int4(tile) + jnp.int8(8)).astype(dtype)
        values = unpack_int4(tile).astype(jnp.float32)
        return (values if zeros is None else values - zeros[:, None]).astype(dtype)

    name, size = jnp.dtype(dtype).name, tile.shape[1] * per_byte
    pairs, base = PTX[format, name], None
    if format == "int4":
        base = jnp.full((ROWS,), OFFSET[name], dtype) if zeros is None else (zeros + OFFSET[name]).astype(dtype)
        base = plgpu.layout_cast(base, PER_ROW)
    elif (format, name) == ("int8", "bfloat16"):
        base = _unknown(EXPONENT)
    arrays = (tile,) if base is None else (tile, base)

    @plgpu.inline_mgpu(
        arg_types=(layout(format), PER_ROW)[: len(arrays)],
        return_type=plgpu.ShapeDtypeStruct((ROWS, inputs), dtype, layout=WG),
    )
    def registers(_: Any, tile: Any, base: Any = None) -> Any:
        loads = tile.registers.reshape(-1, 2)
        words = loads[first * len(loads) // size : (first + inputs) * len(loads) // size]
        out = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, inputs)), object)
        flat = out.reshape(len(words), len(pairs), 2)
        pair = ir.VectorType.get((2,), _type(name))
        for block, half in np.ndindex(words.shape):
            arguments = [_word(words[block, half])]
            if base is not None:
                register = base.registers.flat[half]
                arguments.append(_twice(register) if format == "int4" else _word(register))
            for i, value in enumerate(_assemble(pairs, arguments)):
                flat[block, i, half] = mgpu.utils.bitcast(value, pair)
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return registers(*arrays)


def _unknown(value: int) -> jax.Array:
    """[64] i32. A constant that ptxas knows is put into a register anew for each instruction; this one stays."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=PER_ROW))
    def registers(_: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        ptx = f"{{ .reg .u32 t; mov.u32 t, %smid; shr.u32 t, t, 24; add.u32 $0, t, {value}; }}"
        out = np.empty(mgpu.WGMMA_ROW_LAYOUT.registers_shape((ROWS,)), object)
        out.fill(mgpu.utils.bitcast(llvm.inline_asm(word, [], ptx, "=r"), ir.VectorType.get((1,), word)))
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=True)

    return registers()


def column(columns: jax.Array, at: jax.Array, interpret: Any) -> jax.Array:
    """One of 8 columns, as float32 a row. columns: [64, 8] bf16 or f16 in the layout WG, two a thread, or uint8, the
    exponents of mxfp4, of which 255 is infinity here; at: i32.
    """
    exponents = columns.dtype == jnp.uint8
    if interpret is not None:
        one = lax.dynamic_index_in_dim(columns, at, 1, keepdims=False)
        return e8m0(one) if exponents else one.astype(jnp.float32)
    name, dtype = columns.dtype.name, jnp.float32 if exponents else columns.dtype

    @plgpu.inline_mgpu(arg_types=(WG, PER_ROW), return_type=plgpu.ShapeDtypeStruct((ROWS,), dtype, layout=PER_ROW))
    def registers(_: Any, columns: Any, at: Any) -> Any:
        out = np.empty(mgpu.WGMMA_ROW_LAYOUT.registers_shape((ROWS,)), object)
        for half, register in enumerate(columns.registers.flat):
            snippet = _POWER if exponents else _COLUMN
            (value,) = _assemble([snippet], [_word(register), _word(at.registers.flat[half])])
            if exponents:
                out.flat[half] = mgpu.utils.bitcast(value, ir.VectorType.get((1,), ir.F32Type.get()))
                continue
            pair = mgpu.utils.bitcast(value, ir.VectorType.get((2,), _type(name)))
            out.flat[half] = mgpu.utils.vector_slice(pair, slice(0, 1))
        return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None)

    at = plgpu.layout_cast(jnp.full((ROWS,), at, jnp.int32), PER_ROW)
    return registers(columns, at).astype(jnp.float32)


def _type(name: str) -> ir.Type:
    return ir.BF16Type.get() if name == "bfloat16" else ir.F16Type.get()


def _word(register: ir.Value) -> ir.Value:
    """A register of 16 or 32 bits as a word."""
    word, bits = ir.IntegerType.get_signless(32), mgpu.utils.bitwidth(register.type)
    register = mgpu.utils.bitcast(register, ir.IntegerType.get_signless(bits))
    return register if bits == 32 else llvm.zext(word, register)


def _twice(register: ir.Value) -> ir.Value:
    """Both halves of a word the 16 bits of this register."""
    return _word(mgpu.utils.vector_concat([register, register]))


def _assemble(ptx: list[str], arguments: list[ir.Value]) -> list[ir.Value]:
    """One register for each snippet; the arguments are `w` and `base` in them."""
    word = ir.IntegerType.get_signless(32)
    count = len(ptx)
    moves = [f"mov.b32 {name}, ${count + i};" for i, name in zip(range(len(arguments)), ("w", "base"), strict=False)]
    body = [snippet.format(out=f"${i}") for i, snippet in enumerate(ptx)]
    result = llvm.inline_asm(
        word if count == 1 else llvm.StructType.get_literal([word] * count),
        arguments,
        "\n".join(["{ .reg .b32 t, u, w, base; .reg .b16 h;", *moves, *body, "}"]),
        ",".join(["=&r"] * count + ["r"] * len(arguments)),
    )
    return [result] if count == 1 else [llvm.extractvalue(word, result, [i]) for i in range(count)]
