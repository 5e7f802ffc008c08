"""Attention of many queries on Hopper in decode's key order: `decode_attention`'s kernel, with
limits for each query.

A decode step's query sees all keys of its row; here each query sees those from its first to its
last. Steps and chunks that it does not see add zeros to its sums, and its references are integers,
so they change none of its bits: what a token gets is what a decode step over the same keys, in the
same blocks, gives it.
"""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp

from pallas_kernels.attention import reference
from pallas_kernels.attention.reference import Keys
from pallas_kernels.decode_attention import KeyValues
from pallas_kernels.decode_attention import hopper as decode
from pallas_kernels.exact import with_gradient_of
from pallas_kernels.partition import partitioned


def lacks(query, blocks) -> str:
    """What the kernel would need to serve a call; empty where it does."""
    return decode.lacks(query[:, 0], [_cache(block.keys, block.values) for block in blocks])


def attention(query, blocks, score_scale, value_scale, out_dtype):
    scales = [jnp.asarray(x, jnp.float32) for x in (score_scale, value_scale)]

    def plain(query, score_scale, value_scale, *arrays):
        return reference.attend(query, _blocks(arrays), score_scale, value_scale, out_dtype)

    run = with_gradient_of(plain, partial(_in_decodes_order, out_dtype=out_dtype))
    return run(query, *scales, *(x for block in blocks for x in block))


def _blocks(arrays) -> list[Keys]:
    return [Keys(*arrays[i : i + 3]) for i in range(0, len(arrays), 3)]


def _cache(keys, values) -> KeyValues:
    return KeyValues(keys, values, jnp.full(len(keys), keys.shape[2], jnp.int32))


def _in_decodes_order(query, score_scale, value_scale, *arrays, out_dtype):
    b, t, heads, dim = query.shape
    blocks = _blocks(arrays)
    found, gaps = zip(*(_limits(block, b, t) for block in blocks), strict=True)
    # rows of every block are split over a mesh with the rows that all of them have in common
    lead, kv_heads = math.gcd(*(len(block.keys) for block in blocks)), blocks[0].keys.shape[1]
    scales = jnp.stack([jnp.broadcast_to(x, kv_heads) for x in (score_scale, value_scale)])
    grouped = query.reshape(lead, b // lead, t, kv_heads, heads // kv_heads, dim)
    limits = jnp.stack(found).reshape(len(blocks), 2, lead, b // lead, t)
    held = [
        x.reshape(lead, -1, *x.shape[1:]) for block in blocks for x in (block.keys, block.values)
    ]

    def run(query, scales, limits, *held):
        caches = [
            _cache(*(x.reshape(-1, *x.shape[2:]) for x in held[i : i + 2]))
            for i in range(0, len(held), 2)
        ]
        bounds = [
            tuple(limit.reshape(2, len(cache.keys), -1))
            for limit, cache in zip(limits, caches, strict=True)
        ]
        flat = query.reshape(-1, query.shape[3] * query.shape[4], dim)
        return decode.attend(flat, caches, bounds, scales[0], scales[1], out_dtype).reshape(
            query.shape
        )

    axes = [
        "r n t h g d",
        "e h",
        "i l r n t",
        *(f"r n{i} h s{i} d" for i in range(len(blocks)) for _ in range(2)),
    ]
    whole = tuple({name for names in axes for name in names.split()} - {"r", "h"})
    out = partitioned(run, f"{', '.join(axes)} -> {axes[0]}", {}, whole)(
        grouped, scales, limits, *held
    )
    return jnp.where(sum(gaps)[..., None, None] > 0, jnp.nan, out.reshape(query.shape))


def _limits(block: Keys, b: int, t: int):
    """The first slot that each query sees, and the one after its last, int32 [2, b, t]; how many it
    does not see between."""
    rows, slots = len(block.keys), block.mask.shape[-1]
    some = block.mask.any(-1)
    first = jnp.where(some, block.mask.argmax(-1), slots)
    last = jnp.where(some, slots - block.mask[..., ::-1].argmax(-1), 0)
    gaps = jnp.where(some, last - first - block.mask.sum(-1), 0)
    first, last, gaps = (
        jnp.broadcast_to(x, (rows, b // rows * t)).reshape(b, t) for x in (first, last, gaps)
    )
    return jnp.stack([first, last]).astype(jnp.int32), gaps
