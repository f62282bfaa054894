"""Linear attention compiled for a GPU that is not there: the memories are updated where they lie."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from jaxinfer.models.recurrence import CHUNK, chunked, cut
from scripts import aot

TOKENS, BATCH, SLOTS, HEADS, SHARED, DIM = 256, 16, 16, 2, 2, 128


def test_a_loop_over_chunks_whose_turns_are_known_and_no_copy_of_the_memories():
    """A GPU waits for the host in every turn of another loop."""

    def run(memory, q, k, v, decay, strength, query_start, slots, fresh, sequence):
        return chunked(memory, q, k, v, decay, strength, cut(query_start, slots, fresh, sequence))

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    by_head, by_value_head = (TOKENS, HEADS), (TOKENS, HEADS, SHARED)
    batch = [shape(BATCH + 1, dtype=jnp.int32), shape(BATCH, dtype=jnp.int32), shape(BATCH, dtype=jnp.bool_)]
    compiled, _ = aot.compile_for_gpu(
        run,
        shape(SLOTS, HEADS, SHARED, DIM, DIM),
        *(shape(*by_head, DIM), shape(*by_head, DIM), shape(*by_value_head, DIM)),
        *(shape(*by_value_head), shape(*by_value_head), *batch, shape(TOKENS, dtype=jnp.int32)),
        donate_argnums=(0,),
    )
    text = compiled.as_text()
    chunks = BATCH + (TOKENS - BATCH) // CHUNK
    assert re.findall(r'known_trip_count":\{"n":"(\d+)"', text) == [str(chunks)]
    assert len(re.findall(r" (?:while|conditional)\(", text)) == 1
    assert compiled.memory_analysis().alias_size_in_bytes == SLOTS * HEADS * SHARED * DIM * DIM * 4
    assert not re.findall(rf"f32\[{SLOTS},{HEADS},{SHARED},{DIM},{DIM}\]\S* copy\(", text)
