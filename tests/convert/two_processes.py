"""One of two processes that share a mesh of four devices: `python -m tests.convert.two_processes RANK PORT FOLDER`.

Loads the checkpoints FOLDER/hf and FOLDER/native, and writes to FOLDER/RANK.json, for each, the bytes that it read from
files, those of its shards, and a sum over every shard.
"""

import json
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import tensorstore as ts

import convert
from convert.tensors import Stored
from tests.convert.meshed import load_flat


def main(rank, port, folder):
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    results = []
    for name in ("hf", "native"):
        checkpoint, before = convert.open_checkpoint(f"{folder}/{name}"), bytes_read()
        weights = load_flat(checkpoint, 4)
        read, shards = bytes_read() - before, [w.addressable_shards for w in weights.values()]
        held = sum(each[0].data.nbytes for each in shards) + sum(
            each[1].data.nbytes for each in shards if each[1].index != each[0].index
        )
        sums = [zlib.crc32(np.asarray(shard.data).tobytes()) for each in shards for shard in each]
        results.append({"read": read, "held": held, "sums": sums})
    Path(f"{folder}/{rank}.json").write_text(json.dumps(results))


COUNTED = [0]


def bytes_read():
    """Of safetensors, and by tensorstore."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return COUNTED[0] + sum(value["value"] for metric in metrics for value in metric["values"])


def count(read):
    def counted(*arguments):
        rows = read(*arguments)
        COUNTED[0] += rows.nbytes
        return rows

    return counted


if __name__ == "__main__":
    Stored.read, Stored.read_columns = count(Stored.read), count(Stored.read_columns)
    main(*sys.argv[1:])
