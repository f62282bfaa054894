"""Batches: what is in which row, shapes that were announced, bits that survive the trip."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import CacheConfig, EngineConfig
from jaxinfer.engine.batch import (
    NO_ID,
    NO_TARGET,
    UNREAD,
    Batch,
    BatchBuilder,
    BatchShape,
    fields,
    packed_size,
    sampling_inputs,
    unpack,
)
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import RELEASED, Scheduled
from jaxinfer.sampling_params import MAX_SUPPRESSED, SamplingParams

ENGINE = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, cache=CacheConfig(page_size=4))


def builder(engine=ENGINE, groups=2, data_dependent=True):
    return BatchBuilder(engine, groups, data_dependent)


def request(prompt, output=(), *, unread=0, slot=0, pages=None, seed=0, index=0, ends=(), **params):
    made = Request("r", list(prompt), SamplingParams(**params), 64, seed, index, frozenset(ends))
    made.output_token_ids, made.num_unread, made.slot = list(output), unread, slot
    length = len(prompt) + len(output) + unread
    made.pages = [list(range(10 * g, 10 * g - (-length // 4))) for g in (1, 2)] if pages is None else pages
    return made


def part(made, start, count):
    return Scheduled(made, start, count, samples=start + count == made.num_tokens)


def test_a_ragged_batch_row_by_row():
    chunk = request([5, 6, 7, 8, 9, 10, 11], slot=3, pages=[[RELEASED, 4], [1, 2]], temperature=0.0)
    decode = request([20, 21], [22], unread=1, slot=1, pages=[[7], [8]], seed=2**32 - 1, index=5, top_k=3, top_p=0.5)
    batch = builder().build([part(chunk, 4, 2), part(decode, 3, 1)])
    a = batch.arrays
    assert batch.shape == BatchShape(16, 4, 16, 2, decode=False, sampling="branch", scored=False)
    assert a["tokens"].tolist() == [9, 10, UNREAD, *[0] * 13]
    assert a["positions"].tolist() == [4, 5, 3, *[0] * 13]
    assert a["query_start"].tolist() == [0, 2, 3, 3, 3]
    assert a["lengths"].tolist() == [6, 4, 0, 0]
    assert a["slots"].tolist() == [3, 1, 4, 4]  # 4: no row of last_ids
    assert a["samples"].tolist() == [0, 1, 0, 0]
    assert a["logit_rows"].tolist() == [1, 2, 0, 0]
    assert a["sample_rows"].tolist() == [0, 1, 2, 3]
    assert a["targets"].tolist() == [NO_TARGET] * 4
    assert a["block_tables"].shape == (2, 4, 16)
    assert a["block_tables"][:, :, :3].tolist() == [
        [[0, 4, 0], [7, 0, 0], [0] * 3, [0] * 3],
        [[1, 2, 0], [8, 0, 0], [0] * 3, [0] * 3],
    ]
    assert not a["block_tables"][:, :, 3:].any()
    assert a["seed"].tolist() == [0, 2**32 - 1, 0, 0]
    assert a["choice"].tolist() == [0, 5, 0, 0]
    assert a["temperature"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert a["top_k"].tolist() == [0, 3, 0, 0]
    assert a["top_p"].tolist() == [1.0, 0.5, 1.0, 1.0]
    assert a["min_p"].tolist() == [0.0] * 4
    assert (a["suppressed"] == NO_ID).all()
    assert a["flags"].tolist() == [1, 1, 0]


def test_a_decode_batch_has_row_b_of_sequence_b():
    parts = [part(request([i + 1], [i + 40], slot=i), 1, 1) for i in range(3)]
    batch = builder().build(parts)
    assert batch.shape == BatchShape(4, 4, 16, 2, decode=True, sampling="branch")
    assert batch.arrays["tokens"].tolist() == [40, 41, 42, 0]
    assert batch.arrays["positions"].tolist() == [1, 1, 1, 0]
    assert batch.arrays["query_start"].tolist() == [0, 1, 2, 3, 3]
    assert batch.arrays["lengths"].tolist() == [2, 2, 2, 0]
    assert batch.arrays["logit_rows"].tolist() == [0, 1, 2, 0]
    assert batch.arrays["flags"].tolist() == [1, 0, 0]


def test_a_scored_batch_has_a_row_and_a_target_for_every_token():
    """Targets are the prompt's next ids; the row that samples reports what it sampled."""
    whole = request([5, 6, 7, 8], slot=0, prompt_logprobs=2, logprobs=1)
    chunk = request([30, 31, 32, 33, 34, 35], slot=1, prompt_logprobs=-1)
    decode = request([20, 21], [22, 23], slot=2)
    batch = builder().build([part(whole, 0, 4), part(chunk, 1, 3), part(decode, 3, 1)])
    a = batch.arrays
    assert batch.shape == BatchShape(16, 4, 16, 2, decode=False, sampling="branch", scored=True)
    assert batch.shape.rows == 16
    assert a["logit_rows"].tolist() == list(range(16))
    assert a["sample_rows"].tolist() == [3, 6, 7, 0]
    assert a["samples"].tolist() == [1, 0, 1, 0]
    assert a["targets"].tolist() == [6, 7, 8, NO_TARGET, 32, 33, 34, NO_TARGET, *[NO_TARGET] * 8]
    assert a["flags"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("params", "scored"),
    [
        ({}, False),
        ({"logprobs": 20}, False),
        ({"logprobs": -1}, True),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": -1}, True),
    ],
)
def test_which_batches_are_scored(params, scored):
    made = request([1, 2, 3], **params)
    assert builder().build([part(made, 0, 3)]).shape.scored == scored
    made.num_prompt_scored = 3
    assert builder().build([part(made, 0, 3)]).shape.scored == (params.get("logprobs") == -1)


def test_a_scored_decode_returns_rows_too():
    made = request([1, 2], [3], logprobs=-1)
    assert builder().build([part(made, 2, 1)]).shape == BatchShape(16, 4, 16, 2, False, "branch", scored=True)


def test_scored_batches_are_padded_to_their_own_limit():
    engine = EngineConfig(max_model_len=400, max_num_seqs=300, max_num_batched_tokens=700)
    make = builder(engine, groups=1)
    parts = [part(request([0] * 290, pages=[[0] * 5], logprobs=-1), 0, 290)]
    assert make.shape(parts).tokens == make.max_scored_tokens == 300
    assert make.shape(parts) in make.shapes()


def test_prompt_logprobs_alone_ask_for_logprobs():
    made = request([1, 2], temperature=0.0, prompt_logprobs=1)
    assert builder().build([part(made, 0, 2)]).arrays["flags"].tolist() == [0, 0, 1]


def test_end_and_stop_ids_are_suppressed_until_min_tokens():
    def suppressed(output, unread=0, min_tokens=3):
        made = request([5, 6], output, unread=unread, min_tokens=min_tokens, ends=(9, 2), stop_token_ids=[7, 2])
        row = builder().build([part(made, made.num_tokens - 1, 1)]).arrays["suppressed"][0]
        assert (row[3:] == NO_ID).all()
        return row[:3].tolist()

    assert suppressed([]) == suppressed([1]) == suppressed([1, 1]) == [2, 7, 9]
    assert suppressed([1], unread=1) == [2, 7, 9]
    assert suppressed([1, 1, 1]) == suppressed([1, 1], unread=1) == [NO_ID] * 3
    assert suppressed([], min_tokens=0) == [NO_ID] * 3


def test_a_chunk_that_samples_nothing_may_have_any_number_of_stop_ids():
    """Only min_tokens limits how many there are; a prompt in chunks has no token to hold back."""
    many = list(range(MAX_SUPPRESSED + 1))
    made = request(range(40), stop_token_ids=many)
    assert (builder().build([part(made, 0, 32)]).arrays["suppressed"] == NO_ID).all()


def test_a_temperature_past_float32_stays_finite():
    """Suppressed ids are at −inf, and −inf / inf would be NaN, which an argmax picks."""
    made = request([1, 2], temperature=1e39)
    assert np.isfinite(builder().build([part(made, 0, 2)]).arrays["temperature"][0])


def test_a_top_k_past_int32_keeps_all():
    made = request([1, 2], top_k=2**31)
    assert builder().build([part(made, 0, 2)]).arrays["top_k"][0] >= 2**31 - 1


@pytest.mark.parametrize(
    "shape",
    [
        BatchShape(3, 3, 5, 2, decode=True, sampling="branch"),
        BatchShape(16, 4, 8, 1, decode=False, sampling="full", scored=True),
    ],
)
def test_packing_keeps_every_bit(shape):
    """Also of what is no number: all four bytes of every element are random."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 256, (*dims, 4), np.uint8).view(dtype)[..., 0]
        for name, (dims, dtype) in fields(shape).items()
    }
    packed = Batch(shape, arrays).pack()
    assert packed.dtype == np.int32
    assert packed.shape == (packed_size(shape),)
    unpacked = jax.jit(unpack, static_argnums=1)(packed, shape)
    assert unpacked.keys() == arrays.keys()
    for name, array in arrays.items():
        assert unpacked[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(unpacked[name]).view(np.int32), array.view(np.int32))


def test_the_samplers_part_of_a_batch():
    parts = [part(request([1, 2, 3], slot=0, temperature=0.5, min_p=0.25), 0, 3)]
    batch = builder().build(parts)
    inputs = sampling_inputs(batch.arrays, batch.shape)
    assert inputs.position[0] == 3  # the new token comes after positions 0, 1, 2
    assert (inputs.temperature[0], inputs.min_p[0]) == (0.5, 0.25)
    assert (bool(inputs.any_random), bool(inputs.any_filter), bool(inputs.any_logprobs)) == (True, True, False)


def test_programs_that_cannot_branch_know_their_sampling_while_tracing():
    build = builder(data_dependent=False).build
    greedy = build([part(request([1, 2], temperature=0.0), 0, 2)])
    random = build([part(request([1, 2], temperature=0.0), 0, 2), part(request([3]), 0, 1)])
    logprobs = build([part(request([1, 2], temperature=0.0, logprobs=0), 0, 2)])
    assert [batch.shape.sampling for batch in (greedy, random, logprobs)] == ["greedy", "full", "full"]
    for batch, flag in ((greedy, False), (random, True), (logprobs, True)):
        inputs = sampling_inputs(batch.arrays, batch.shape)
        assert inputs.any_random is inputs.any_filter is inputs.any_logprobs is flag


def test_block_tables_are_as_wide_as_their_pages_where_loops_are_dear():
    engine = EngineConfig(max_model_len=400, max_num_seqs=4, max_num_batched_tokens=32, cache=CacheConfig(page_size=4))
    narrow, wide = builder(engine, data_dependent=False), builder(engine)
    for length, width in [(4, 8), (32, 8), (33, 16), (129, 64), (257, 100), (400, 100)]:
        made = request(range(length))
        assert narrow.shape([part(made, length - 1, 1)]).width == width
        assert wide.shape([part(made, length - 1, 1)]).width == 100
        assert narrow.shape([part(made, length - 2, 2)]).width == 100 or length < 2


@pytest.mark.parametrize(
    ("tokens", "sequences", "largest"),
    [([16, 32], [1, 4], 32), ([16, 64, 256, 512, 1000], [1, 4, 16, 32, 64, 100], 1000), ([3], [1, 3], 3)],
)
def test_the_documented_buckets(tokens, sequences, largest):
    engine = EngineConfig(max_model_len=64, max_num_seqs=sequences[-1], max_num_batched_tokens=largest)
    shapes = builder(engine).shapes()
    plain = [shape for shape in shapes if not shape.decode and not shape.scored]
    assert [shape.tokens for shape in plain] == tokens[::-1]
    assert [shape.sequences for shape in plain] == [min(count, sequences[-1]) for count in tokens[::-1]]
    assert [shape.sequences for shape in shapes if shape.decode] == sequences
    assert [shape.tokens for shape in shapes if shape.scored] == [count for count in tokens if count <= 256]


@st.composite
def schedules(draw):
    """An engine, and sequences that a scheduler may choose for it."""
    sequences = draw(st.integers(1, 40))
    engine = EngineConfig(
        max_model_len=draw(st.integers(8, 600)),
        max_num_seqs=sequences,
        max_num_batched_tokens=draw(st.integers(sequences, 700)),
        cache=CacheConfig(page_size=draw(st.sampled_from([1, 4, 16]))),
    )
    make = builder(engine, groups=1, data_dependent=draw(st.booleans()))
    scored = draw(st.booleans())
    budget = make.max_scored_tokens if scored else engine.max_num_batched_tokens
    parts = []
    for slot in range(draw(st.integers(1, sequences))):
        if not budget:
            break
        length = draw(st.integers(1, engine.max_model_len - 1))
        count = draw(st.just(1) | st.integers(1, min(length, budget)))
        params = {"prompt_logprobs": 1} if scored and not slot else {"temperature": float(slot % 2)}
        pages = [list(range(-(-length // engine.cache.page_size)))]
        parts.append(part(request([0] * length, slot=slot, pages=pages, **params), length - count, count))
        budget -= count
    return make, parts


@settings(max_examples=150)
@given(schedules())
def test_every_shape_was_announced_and_holds_its_batch(schedule):
    make, parts = schedule
    batch = make.build(parts)
    assert batch.shape in make.shapes()
    assert {name: (array.shape, array.dtype) for name, array in batch.arrays.items()} == fields(batch.shape)
    assert batch.arrays["query_start"][-1] == sum(each.count for each in parts) <= batch.shape.tokens
    assert batch.arrays["samples"].sum() == len(parts) <= batch.shape.sequences
