"""Writes PyTorch's zip format by hand, damaged too, and the pickles that go in it."""

import argparse
import json
import pickle
import struct
import zipfile

import numpy as np

STORAGE = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
}


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    return b"J" + struct.pack("<i", value) if -(2**31) <= value < 2**31 else b"\x8a\x10" + value.to_bytes(16, "little")


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def reference(module, name):
    return f"c{module}\n{name}\n".encode()


def tensor(key, dtype, elements, offset, shape, strides):
    """The pickle of a call of `_rebuild_tensor_v2`."""
    storage = b"(" + text("storage") + reference("torch", STORAGE[dtype]) + text(key) + text("cpu") + number(elements)
    rebuilt = number(offset) + numbers(shape) + numbers(strides) + b"\x89" + reference("collections", "OrderedDict")
    return reference("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + b"tQ" + rebuilt + b")RtR"


def dictionary(entries):
    """The pickle of a dict: name → pickled value."""
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in entries.items()) + b"u."


def nested(value, records):
    """The pickle of dicts of dicts, namespaces and whatever pickle itself writes; arrays go to `records` as tensors."""
    if isinstance(value, np.ndarray):
        key, array = str(len(records)), np.ascontiguousarray(value)
        records[key] = array
        strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
        return tensor(key, array.dtype.name, array.size, 0, array.shape, strides)
    if isinstance(value, dict):
        return b"}(" + b"".join(nested(key, records) + nested(inner, records) for key, inner in value.items()) + b"u"
    if isinstance(value, argparse.Namespace):
        return reference("argparse", "Namespace") + b")\x81" + nested(vars(value), records) + b"b"
    # Of one that begins with its protocol and ends with a stop; what it memoizes is not asked for again.
    return pickle.dumps(value, protocol=2)[2:-1]


def write_nested(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    records = {}
    return archive(path, b"\x80\x02" + nested(value, records) + b".", records)


def archive(path, data, records, *, compression=zipfile.ZIP_STORED, extra=()):
    """records: key → array or bytes. extra: (name, bytes) of more entries."""
    with zipfile.ZipFile(path, "w", compression) as out:
        out.writestr("archive/data.pkl", data)
        out.writestr("archive/byteorder", b"little")
        for key, record in records.items():
            out.writestr(f"archive/data/{key}", record if isinstance(record, bytes) else record.tobytes())
        for name, record in extra:
            out.writestr(name, record)
    return path


def write(path, tensors, **options):
    """A state dict as torch.save writes it, every tensor with a storage of its own."""
    entries = {}
    for key, (name, array) in enumerate(tensors.items()):
        strides = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
        entries[name] = tensor(str(key), array.dtype.name, array.size, 0, array.shape, strides)
    return archive(path, dictionary(entries), {str(k): a for k, a in enumerate(tensors.values())}, **options)


def write_sharded(folder, tensors, shards):
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        members = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write(folder / file, {name: tensors[name] for name in members})
        weight_map |= dict.fromkeys(members, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
