"""Linear attention with decay, with or without the delta rule: one step of it, many tokens one by one, or in chunks.

A head's memory S [key_dim, value_dim] takes a token with key k, value v, decay a and strength b, and answers its query:

    S ← a · S,   u = b · (v − Sᵀk),   S ← S + k uᵀ,   out = Sᵀq        the gated delta rule (Yang et al. 2024)
    S ← a · S + k vᵀ,                                 out = Sᵀq        without it: lightning attention (Qin et al. 2024)

Over a chunk of tokens, with A[i] the product of its decays up to token i and S₀ the memory before it, the us solve a
unit lower triangular system (the UT transform), and the rest is matrix products:

    (I + strict_lower(b[i] · A[i] / A[j] · k[i]·k[j])) U = b · (V − A · K S₀)
    out = A · Q S₀ + lower(A[i] / A[j] · q[i]·k[j]) U,   S = A[last] · S₀ + (A[last] / A · K)ᵀ U

Everything is float32: memories are sums over whole sequences. Heads are [key_heads, value heads that share one].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 64
"""Tokens that are taken together; a chunk holds those of one sequence only."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "valid", "slots", "fresh", "places"], meta_fields=[]
)
@dataclass(frozen=True)
class Chunks:
    """A ragged batch cut into chunks, in order: those of a sequence follow each other."""

    rows: jax.Array
    """[chunks, CHUNK] i32: the token in each place."""
    valid: jax.Array
    """[chunks, CHUNK] bool: whether there is one."""
    slots: jax.Array
    """[chunks] i32: of its sequence; past the last slot where a chunk holds nothing."""
    fresh: jax.Array
    """[chunks] bool: its sequence starts with it, or it holds nothing."""
    places: jax.Array
    """[tokens] i32: where each token went, of chunks · CHUNK places."""


def cut(query_start: jax.Array, slots: jax.Array, fresh: jax.Array, sequence: jax.Array) -> Chunks:
    """query_start: [batch + 1] i32; slots: [batch] i32; fresh: [batch] bool; sequence: [tokens] i32, of each token.

    As many chunks as the batch could need: each of its sequences may fill its last one with a single token.
    """
    tokens, batch = sequence.shape[0], slots.shape[0]
    most = batch + max(0, tokens - batch) // CHUNK
    each = -(-jnp.diff(query_start) // CHUNK)
    ends = jnp.cumsum(each)
    starts = ends - each
    chunk = jnp.arange(most)
    of = jnp.minimum(jnp.searchsorted(ends, chunk, side="right", method="compare_all"), batch - 1)
    first = query_start[of] + (chunk - starts[of]) * CHUNK
    rows = first[:, None] + jnp.arange(CHUNK)
    used = chunk < ends[-1]
    return Chunks(
        rows=jnp.minimum(rows, tokens - 1),
        valid=used[:, None] & (rows < query_start[of + 1][:, None]),
        slots=jnp.where(used, slots[of], jnp.iinfo(jnp.int32).max),
        fresh=~used | (fresh[of] & (chunk == starts[of])),
        places=starts[sequence] * CHUNK + jnp.arange(tokens) - query_start[sequence],
    )


def step(
    memory: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, strength: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence. Returns [batch, heads, shared, value_dim], and the memories after it; all f32.

    memory: [batch, heads, shared, key_dim, value_dim]; q, k: [batch, heads, key_dim]; v: [batch, heads, shared,
    value_dim]; log_decay, strength: [batch, heads, shared]; strength None: no delta rule.
    """
    decay, q, k = jnp.exp(log_decay)[..., None], q[:, :, None, :, None], k[:, :, None, :, None]
    if strength is not None:
        v = (v - decay * jnp.sum(memory * k, axis=-2)) * strength[..., None]
    # Sᵀq of the new S without reading that: the old one is read once for both products, and once to be written anew.
    out = decay * jnp.sum(memory * q, axis=-2) + v * jnp.sum(q * k, axis=-2)
    return out, decay[..., None] * memory + k * v[..., None, :]


def one_by_one(
    memory: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array | None,
    slots: jax.Array,
    fresh: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """All tokens of a ragged batch. Returns [tokens, heads, shared, value_dim], and the memories after them; all f32.

    memory: [slots, heads, shared, key_dim, value_dim], of every sequence; slots: [tokens], of each token's sequence, or
    past the last for padding; fresh: [tokens], whether its sequence starts with it; the others as in `step`, a row for
    each token. Steps are what they are when decoding: results have the same bits wherever a sequence is cut.
    """

    def advance(memory: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        slot, fresh, *inputs = token
        before = jnp.where(fresh, 0.0, memory.at[slot].get(mode="clip"))
        out, after = step(before[None], *jax.tree.map(lambda x: x[None], inputs))
        return memory.at[slot].set(after[0], mode="drop"), out[0]

    memory, out = jax.lax.scan(advance, memory, (slots, fresh, q, k, v, log_decay, strength))
    return out, memory


def chunked(
    memory: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array | None,
    chunks: Chunks,
) -> tuple[jax.Array, jax.Array]:
    """As `one_by_one`, by matrix products. How a result is rounded depends on where a sequence was cut before, for
    which its neighbours may be the reason.
    """
    product = jnp.einsum

    def chunk(x: jax.Array) -> jax.Array:
        """[tokens, heads, ...] → [chunks, heads, ..., CHUNK, last], zero where no token is."""
        taken = jnp.where(chunks.valid.reshape(*chunks.valid.shape, *[1] * (x.ndim - 1)), x[chunks.rows], 0)
        return jnp.moveaxis(taken, 1, -2)

    q, k, v, decay = chunk(q), chunk(k), chunk(v), chunk(log_decay[..., None])[..., 0]
    total = jnp.cumsum(decay, axis=-1)  # log A: [chunks, heads, shared, CHUNK]
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    between = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    scores = product("nhik,nhjk->nhij", q, k)[:, :, None] * between
    values, keys = v, None
    if strength is not None:
        b = chunk(strength[..., None])
        system = jnp.tril(product("nhik,nhjk->nhij", k, k)[:, :, None] * between * b, -1)
        solve = inverse_of_unit_lower(system)
        values = product("nhrij,nhrjv->nhriv", solve, b * v)
        keys = product("nhrij,nhrjk->nhrik", solve, b * jnp.exp(total)[..., None] * k[:, :, None])
    queries = q[:, :, None] * jnp.exp(total)[..., None]
    last = jnp.exp(total[..., -1:])
    kept = k[:, :, None] * jnp.exp(total[..., -1:] - total)[..., None]

    def advance(memory: jax.Array, chunk: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        slot, fresh, values, keys, queries, kept, last = chunk
        before = jnp.where(fresh, 0.0, memory.at[slot].get(mode="clip"))
        if keys is not None:
            values = values - product("hrik,hrkv->hriv", keys, before)
        answers = product("hrik,hrkv->hriv", queries, before)
        after = last[..., None] * before + product("hrik,hriv->hrkv", kept, values)
        return memory.at[slot].set(after, mode="drop"), (values, answers)

    memory, (values, answers) = jax.lax.scan(
        advance, memory, (chunks.slots, chunks.fresh, values, keys, queries, kept, last)
    )
    out = answers + product("nhrij,nhrjv->nhriv", scores, values)
    out = jnp.moveaxis(out, -2, 1).reshape(-1, *v.shape[1:-2], v.shape[-1])
    return out.at[chunks.places].get(mode="clip"), memory


def inverse_of_unit_lower(strict: jax.Array) -> jax.Array:
    """(I + strict)⁻¹ of strictly lower triangular [..., n, n], n a power of two.

    From blocks on the diagonal to blocks of twice their size, A⁻¹ and B⁻¹ to the inverse of [[A, 0], [C, B]], which has
    −B⁻¹ C A⁻¹ below. In full float32 whatever the rest is computed in, since errors in it multiply.
    """
    n = strict.shape[-1]
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    row, column = jnp.arange(n)[:, None], jnp.arange(n)
    inverse, size = jnp.eye(n, dtype=strict.dtype), 1
    while size < n:
        below = (row // size == column // size + 1) & (row // (2 * size) == column // (2 * size))
        inverse = inverse - product(product(inverse, jnp.where(below, strict, 0)), inverse)
        size *= 2
    return inverse


def convolve(
    x: jax.Array, weight: jax.Array, before: jax.Array, query_start: jax.Array, sequence: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A causal convolution over each sequence, channel by channel. Returns [tokens, heads, channels] f32, and the
    inputs that its next token will need.

    x: [tokens, heads, channels]; weight: [heads, channels, width]; before: [batch, heads, width − 1, channels] f32, the
    inputs that came before this batch, the newest last; query_start, sequence: as in `cut`.
    """
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    tokens, kept = x.shape[0], before.shape[2]
    offset = jnp.arange(tokens) - query_start[sequence]
    out = x * weight[..., kept]
    for back in range(1, kept + 1):
        earlier = jnp.roll(x, back, axis=0)  # what it turns around to the front belongs to no sequence here
        stored = before[sequence, :, jnp.clip(kept + offset - back, 0, kept - 1)]
        out += jnp.where((offset >= back)[:, None, None], earlier, stored) * weight[..., kept - back]
    # The last `kept` of what came before and these: counted from the first of these, from count − kept on.
    place = jnp.diff(query_start)[:, None] - kept + jnp.arange(kept)  # [batch, kept]
    new = jnp.moveaxis(x[jnp.clip(query_start[:-1, None] + place, 0, tokens - 1)], 1, 2)
    old = jnp.take_along_axis(before, jnp.clip(kept + place, 0, kept - 1)[:, None, :, None], axis=2)
    return out, jnp.where((place >= 0)[:, None, :, None], new, old)
