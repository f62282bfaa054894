"""Quantized projections made by hand from each format's description, slowly, with what they mean.

Every maker takes (outputs, inputs, random generator) and returns (what is stored: the rest of the name → array, the
weight [outputs, inputs] float32).
"""

import json

import ml_dtypes
import numpy as np

NF4 = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
GROUP = 32


def words(values, bits):
    """[count, columns] → [⌈count · bits / 32⌉, columns] int32: each column one long number, the first value lowest."""
    count, columns = values.shape
    size = -(-count * bits // 32)
    packed = np.empty((size, columns), np.uint32)
    for column in range(columns):
        number = sum(int(value) << (bits * place) for place, value in enumerate(values[:, column]))
        packed[:, column] = np.frombuffer(number.to_bytes(4 * size, "little"), "<u4")
    return packed.view(np.int32)


def random_scales(rng, *shape):
    return (0.01 + rng.random(shape) / 40).astype(np.float32)


def gptq(outputs, inputs, rng, *, bits=4, act_order=False, version=1, group=GROUP, symmetric=False, least=1):
    groups = inputs // group
    q = rng.integers(0, 2**bits, (inputs, outputs))
    zero = rng.integers(least, 2**bits, (groups, outputs))
    if symmetric:
        zero[:] = 2 ** (bits - 1)
    scale = random_scales(rng, groups, outputs).astype(np.float16)
    g_idx = np.repeat(np.arange(groups), group)
    if act_order:
        g_idx = rng.permutation(g_idx)
    weight = np.empty((outputs, inputs), np.float32)
    for i in range(inputs):
        weight[:, i] = scale[g_idx[i]].astype(np.float32) * (q[i] - zero[g_idx[i]])
    stored = {"qweight": words(q, bits), "scales": scale, "g_idx": g_idx.astype(np.int32)}
    stored["qzeros"] = np.ascontiguousarray(words((zero - (version == 1)).T, bits).T)
    return {f".{name}": array for name, array in stored.items()}, weight


def awq(outputs, inputs, rng, *, zeros=True):
    groups = inputs // GROUP
    q = rng.integers(0, 16, (inputs, outputs))
    zero = rng.integers(0, 16, (groups, outputs)) if zeros else np.full((groups, outputs), 8)
    scale = random_scales(rng, groups, outputs).astype(np.float16)

    def packed(values):
        out = np.zeros((len(values), outputs // 8), np.uint32)
        for column in range(outputs // 8):
            for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[:, column] |= values[:, 8 * column + output].astype(np.uint32) << np.uint32(4 * place)
        return out.view(np.int32)

    weight = np.empty((outputs, inputs), np.float32)
    for i in range(inputs):
        weight[:, i] = scale[i // GROUP].astype(np.float32) * (q[i] - zero[i // GROUP])
    stored = {".qweight": packed(q), ".scales": scale}
    return stored | ({".qzeros": packed(zero)} if zeros else {}), weight


def awq_gemv(outputs, inputs, rng):
    groups = inputs // GROUP
    width = -(-groups // 8) * 4  # more than are needed, as for the kernel
    q, zero = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, (outputs, groups))
    scale = np.zeros((outputs, 8 * width), np.float16)
    scale[:, :groups] = random_scales(rng, outputs, groups)
    qzeros = np.zeros((outputs, width), np.int32)
    used = np.ascontiguousarray(words(zero.T, 4).T)
    qzeros[:, : used.shape[1]] = used
    each = np.arange(inputs) // GROUP
    weight = scale[:, each].astype(np.float32) * (q - zero[:, each])
    return {".qweight": np.ascontiguousarray(words(q.T, 4).T), ".qzeros": qzeros, ".scales": scale}, weight


def compressed_packed(outputs, inputs, rng, *, bits=4, zeros=False, group=GROUP, act_order=False):
    groups, middle = inputs // group, 2 ** (bits - 1)
    q = rng.integers(-middle, middle, (outputs, inputs))
    zero = rng.integers(-middle, middle, (outputs, groups)) if zeros else np.zeros((outputs, groups), int)
    scale = random_scales(rng, outputs, groups)
    g_idx = np.repeat(np.arange(groups), group)
    if act_order:
        g_idx = rng.permutation(g_idx)
    weight = np.stack([scale[:, g] * (q[:, i] - zero[:, g]) for i, g in enumerate(g_idx)], axis=1).astype(np.float32)
    stored = {
        ".weight_packed": np.ascontiguousarray(words((q + middle).T, bits).T),
        ".weight_scale": scale,
        ".weight_shape": np.array([outputs, inputs]),
    }
    if zeros:
        stored[".weight_zero_point"] = words(zero + middle, bits)
    if act_order:
        stored[".weight_g_idx"] = g_idx.astype(np.int32)
    return stored, weight


def compressed_int8(outputs, inputs, rng, *, zeros=False, each="output"):
    q = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    shape = {"output": (outputs, 1), "tensor": (1,), "group": (outputs, inputs // GROUP)}[each]
    scale = random_scales(rng, *shape).astype(ml_dtypes.bfloat16)
    zero = rng.integers(-9, 9, shape).astype(np.int8) if zeros else np.zeros(shape, np.int8)
    wide = np.broadcast_to if each != "group" else lambda array, shape: np.repeat(array, GROUP, axis=1)
    weight = (q.astype(np.float32) - wide(zero, q.shape)) * wide(scale.astype(np.float32), q.shape)
    return {".weight": q, ".weight_scale": scale} | ({".weight_zero_point": zero} if zeros else {}), weight


def fp8(outputs, inputs, rng, *, each="output", suffix="_scale", block=(48, 40), scale_dtype=np.float32):
    q = (rng.random((outputs, inputs)) * 800 - 400).astype(ml_dtypes.float8_e4m3fn)
    blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
    shape = {"output": (outputs, 1), "tensor": (), "block": blocks}[each]
    scale = np.asarray(random_scales(rng, *shape) / 100).astype(scale_dtype)
    wide = np.asarray(scale.astype(np.float32))
    if each == "block":
        wide = np.repeat(np.repeat(wide, block[0], 0), block[1], 1)[:outputs, :inputs]
    return {".weight": q, f".weight{suffix}": scale}, q.astype(np.float32) * wide


def bnb4(outputs, inputs, rng, *, nested=False, block=64):
    count = outputs * inputs
    codes = rng.integers(0, 16, count)
    blocks = -(-count // block)
    largest = random_scales(rng, blocks)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
    stored = {
        "": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        ".quant_map": NF4,
        ".absmax": largest,
    }
    if nested:
        index, levels = rng.integers(0, 256, blocks).astype(np.uint8), np.linspace(-1, 1, 256, dtype=np.float32)
        outer = random_scales(rng, -(-blocks // 16))
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.125}
        largest = levels[index] * np.repeat(outer, 16)[:blocks] + np.float32(0.125)
        stored |= {".absmax": index, ".nested_absmax": outer, ".nested_quant_map": levels}
    stored[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    weight = (NF4[codes] * np.repeat(largest, block)[:count]).reshape(outputs, inputs)
    return {f".weight{name}": array for name, array in stored.items()}, weight


def bnb8(outputs, inputs, rng):
    q = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scb = random_scales(rng, outputs) * 127
    stored = {".weight": q, ".SCB": scb, ".weight_format": np.array(0, np.uint8)}
    return stored, q.astype(np.float32) * (scb / np.float32(127))[:, None]


def mxfp4(experts, outputs, inputs, rng, exponents=(120, 134)):
    """`_blocks` and `_scales`, and the weight [experts, inputs, outputs]."""
    codes = rng.integers(0, 16, (experts, outputs, inputs))
    exponents = rng.integers(*exponents, (experts, outputs, inputs // 32))
    magnitude = {0: 0, 1: 0.5, 2: 1, 3: 1.5, 4: 2, 5: 3, 6: 4, 7: 6}
    weight = np.empty((experts, inputs, outputs), np.float32)
    for e, o, i in np.ndindex(codes.shape):
        code = int(codes[e, o, i])
        sign = -1 if code & 8 else 1
        weight[e, i, o] = sign * magnitude[code & 7] * 2.0 ** (int(exponents[e, o, i // 32]) - 127)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return {"_blocks": blocks.reshape(experts, outputs, -1, 16), "_scales": exponents.astype(np.uint8)}, weight
