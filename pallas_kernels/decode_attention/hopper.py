"""Decode attention on Hopper: queries grouped by the keys that they read, chunks of keys in a
kernel, and their fold."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_attention.chunks import partials
from pallas_kernels.decode_attention.reference import first_seen, known_lengths, page_of
from pallas_kernels.decode_attention.tiles import NOTHING, ROWS, STEP, spans_of, taken

HEAD_DIMS = (64, 96, 128)
_E4M3, _WIDE = "float8_e4m3fn", ("bfloat16", "float16")


def lacks(query, caches) -> str:
    """What the kernel would need to serve a call; empty where it does."""
    if query.shape[2] not in HEAD_DIMS:
        return f"attention with head_dim {query.shape[2]}, but with {HEAD_DIMS}"
    for cache in caches:
        page, per_row = page_of(cache)
        kinds = [x.dtype.name for x in (query, cache.keys, cache.values)]
        if kinds[0] != kinds[1] or not set(kinds) <= {_E4M3, *_WIDE}:
            return (
                f"attention of {', '.join(kinds)} query, keys and values, but of e4m3 and 16 "
                "bits, query and keys alike"
            )
        if page % STEP and cache.pages is not None and cache.pages.shape[1] > 1:
            return f"attention over pages of {page} slots, but of multiples of {STEP}"
        if page % 8 and per_row > 1:
            return (
                f"attention over pages of {page} slots, several a cache row, but of multiples of 8"
            )
    return ""


def decode_attention(query, caches, score_scale, value_scale, window, out_dtype):
    sequences = len(query)
    starts = first_seen([known_lengths(cache) for cache in caches], sequences, window)
    return attend(
        query, caches, [(start, None) for start in starts], score_scale, value_scale, out_dtype
    )


def attend(query, caches, limits, score_scale, value_scale, out_dtype):
    """Attention of queries [sequences, heads, head_dim], of which each sees an interval of the keys
    of its row in each cache.

    Args:
        score_scale, value_scale: float32 [] or [kv_heads].
        limits: of each cache, int32 [rows, sequences of a row]: the first key that a query sees,
            and the first beyond its last; None: no such limit but the row's keys.
    """
    kv_heads, heads = caches[0].keys.shape[1], query.shape[1]
    scale = jnp.asarray(score_scale * math.log2(math.e), jnp.float32)
    scale = jnp.broadcast_to(scale, kv_heads)
    if jnp.ndim(value_scale):
        value_scale = jnp.repeat(value_scale, heads // kv_heads)
    found = None
    for cache, limit in zip(caches, limits, strict=True):
        part = _over(query, cache, limit, scale)
        found = part if found is None else join(found, part)
    _, total, out = found
    out = out * (value_scale / jnp.where(total == 0, 1.0, total))[..., None]
    # the sign of a zero depends on the chunks that a query does not see
    return jnp.where(out == 0, 0.0, out).astype(out_dtype)


def _over(query, cache, limits, scale):
    """What all chunks of a cache leave, joined: float32 [sequences, heads], twice, and [sequences,
    heads, head_dim]."""
    (sequences, heads, dim), (rows,) = query.shape, cache.lengths.shape
    keys, values = (_in_eights(x) for x in (cache.keys, cache.values))
    kv_heads, (page, per_row) = keys.shape[1], page_of(cache)
    group, shared, lengths = heads // kv_heads, sequences // rows, known_lengths(cache)
    if cache.pages is None:
        pages = jnp.arange(rows, dtype=jnp.int32)[:, None]
    else:
        pages = jnp.where((cache.pages >= 0) & (cache.pages < len(keys) * per_row), cache.pages, -1)
    asked = (
        query.reshape(rows, shared, kv_heads, group, dim)
        .swapaxes(1, 2)
        .reshape(rows, kv_heads, -1, dim)
    )
    count = shared * group
    extra = -count % (8 if count <= ROWS else ROWS)
    asked = jnp.pad(asked, [(0, 0), (0, 0), (0, extra), (0, 0)])
    limits = [None if limit is None else _each_query(limit, group, extra) for limit in limits]
    spans = spans_of(lengths, *limits, count + extra)
    stats, sums = partials(
        asked, keys, values, pages, spans, *limits, scale, page=page, slots=cache.keys.shape[2]
    )
    found = fold(stats, sums, taken(len(sums), spans))

    def by_sequence(x):
        x = x[:, :, :count].reshape(rows, kv_heads, shared, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(sequences, heads, *x.shape[4:])

    return tuple(by_sequence(x) for x in found)


def _each_query(limit, group, extra):
    """A limit for every head of the group, and for the queries that fill up the last tile."""
    return jnp.pad(jnp.repeat(limit, group, axis=1), [(0, 0), (0, extra)], mode="edge").astype(
        jnp.int32
    )


def _in_eights(x):
    """x with a multiple of 8 slots, as TMA wants them."""
    extra = -x.shape[2] % 8
    return jnp.pad(x, [(0, 0), (0, 0), (0, extra), (0, 0)]) if extra else x


def fold(stats, sums, took):
    """Joins chunks one after the other: the order of a row's sum is that of its chunks, however
    many there could be."""

    def one(found, part):
        stats, sums, took = part
        took = jnp.repeat(took, sums.shape[2] // took.shape[1], axis=1)[:, None]
        top, total = jnp.where(took, stats[:, :, 0], NOTHING), jnp.where(took, stats[:, :, 1], 0.0)
        return join(found, (top, total, jnp.where(took[..., None], sums, 0.0))), None

    nothing = (
        jnp.full_like(stats[0, :, :, 0], NOTHING),
        jnp.zeros_like(stats[0, :, :, 1]),
        jnp.zeros_like(sums[0]),
    )
    return lax.scan(one, nothing, (stats, sums, took), unroll=min(len(sums), 16))[0]


def join(one, other):
    """(reference, sum of weights, weighted values) of two sets of keys as those of both.

    References are integers, so a factor is a power of two, and it does not matter which product XLA
    adds without rounding it.
    """
    top = jnp.maximum(one[0], other[0])
    scales = [_power_of_two(found[0] - top) for found in (one, other)]
    total = one[1] * scales[0] + other[1] * scales[1]
    return top, total, one[2] * scales[0][..., None] + other[2] * scales[1][..., None]


def _power_of_two(exponent):
    """2^exponent for integers up to 0, exactly; 0 below float32's normal range."""
    bits = (jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)
