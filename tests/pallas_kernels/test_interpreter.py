"""The interpreter finds what it is used to find: a race, a missing wait. Pins the private jax API it reads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_decode.counter import count_arrivals
from tests.pallas_kernels.interpreter import interpreter

SIZE = 128
X = np.arange(SIZE, dtype=np.float32)


def handed_over(x: jax.Array, interpret: Any, *, synchronized: bool) -> jax.Array:
    """One warpgroup writes x to shared memory, the other reads it; without the barrier they race."""

    def body(x_ref: Any, out_ref: Any, shared: Any, written: Any) -> None:
        thread = jax.lax.axis_index("warpgroup")

        @pl.when(thread == 0)
        def _() -> None:
            shared[...] = x_ref[...]
            plgpu.commit_smem()
            if synchronized:
                plgpu.barrier_arrive(written)

        @pl.when(thread == 1)
        def _() -> None:
            if synchronized:
                plgpu.barrier_wait(written)
            out_ref[...] = shared[...] * 2.0

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM((SIZE,), jnp.float32), plgpu.Barrier()],
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
    )(x)


def copied(x: jax.Array, interpret: Any, *, waited: bool) -> jax.Array:
    """x through shared memory by the copy engine; without the wait it may be read before it arrives."""

    def body(x_ref: Any, out_ref: Any, shared: Any, arrived: Any) -> None:
        plgpu.copy_gmem_to_smem(x_ref, shared, arrived)
        if waited:
            plgpu.barrier_wait(arrived)
        out_ref[...] = shared[...] * 2.0

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM((SIZE,), jnp.float32), plgpu.Barrier()],
        interpret=interpret,
    )(x)


def summed_by_the_last(x: jax.Array, interpret: Any, *, counted: bool) -> jax.Array:
    """Two blocks leave x in global memory, and the one that comes second reads both; who does not count races."""

    def body(x_ref: Any, counter: Any, parts: Any, out_ref: Any, told: Any) -> None:
        block = jax.lax.axis_index("block")
        parts[block] = x_ref[...]
        before = block
        if counted:
            (before,) = count_arrivals([counter], told, (), [jnp.int32(2)])

        @pl.when(before == 1)
        def _() -> None:
            out_ref[...] = parts[0] + parts[1]

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((2, SIZE), x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)),
        scratch_types=[plgpu.SMEM((1,), jnp.int32)],
        grid=(2,),
        grid_names=("block",),
        interpret=interpret,
    )(x, jnp.zeros(1, jnp.int32))[1]


def multiplied(x: jax.Array, interpret: Any, *, committed: bool) -> jax.Array:
    """x on a diagonal of shared memory times ones; uncommitted, the matrix unit may read what was there before."""

    def body(x_ref: Any, out_ref: Any, diagonal: Any, ones: Any) -> None:
        diagonal[...] = jnp.where(jnp.arange(64)[:, None] == jnp.arange(64), x_ref[:64], 0.0).astype(jnp.bfloat16)
        ones[...] = jnp.full(ones.shape, 2.0, jnp.bfloat16)
        if committed:
            plgpu.commit_smem()

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, diagonal, ones)
            return acc[...]

        out_ref[:64] = pl.run_scoped(product, plgpu.ACC((64, 8), jnp.float32))[:, 0]
        out_ref[64:] = x_ref[64:] * 2.0

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.SMEM((64, 8), jnp.bfloat16)],
        interpret=interpret,
    )(x)


RIGHT = [functools.partial(handed_over, synchronized=True), functools.partial(copied, waited=True)]
RIGHT += [functools.partial(summed_by_the_last, counted=True), functools.partial(multiplied, committed=True)]


@pytest.mark.parametrize("kernel", RIGHT, ids=["handed_over", "copied", "summed_by_the_last", "multiplied"])
def test_a_right_kernel_passes(kernel):
    with interpreter() as interpret:
        out = np.asarray(kernel(jnp.asarray(X), interpret))
    np.testing.assert_array_equal(out, 2 * X)


WRONG = {
    "no barrier": functools.partial(handed_over, synchronized=False),
    "no wait": functools.partial(copied, waited=False),
    "not counted": functools.partial(summed_by_the_last, counted=False),
    "not committed": functools.partial(multiplied, committed=False),
}


@pytest.mark.parametrize("kernel", WRONG.values(), ids=WRONG)
def test_a_race_is_found(kernel):
    """Whatever the outputs are: without a wait they are even right here."""
    with pytest.raises(AssertionError, match="the kernel has a data race"), interpreter() as interpret:
        jax.block_until_ready(kernel(jnp.asarray(X), interpret))


@pytest.mark.parametrize("order", [("no wait", "right"), ("right", "no wait")])
def test_a_race_in_one_of_two_kernels_is_found(order):
    first, second = ({**WRONG, "right": RIGHT[0]}[name] for name in order)
    with pytest.raises(AssertionError, match="the kernel has a data race"), interpreter() as interpret:
        jax.block_until_ready(second(first(jnp.asarray(X), interpret), interpret))


def test_one_race_leaves_nothing_behind():
    test_a_race_is_found(WRONG["no barrier"])
    test_a_right_kernel_passes(RIGHT[0])


def test_no_kernel_is_no_proof():
    with pytest.raises(AssertionError, match="no kernel ran in the interpreter"), interpreter():
        jnp.asarray(X).sum().block_until_ready()


def test_an_error_leaves_nothing_behind():
    def fail():
        with interpreter() as interpret:
            jax.block_until_ready(WRONG["no wait"](jnp.asarray(X), interpret))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    test_a_right_kernel_passes(RIGHT[0])
