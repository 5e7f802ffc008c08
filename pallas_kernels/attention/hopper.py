"""Attention of many queries on Hopper: cuDNN's, and in decode's key order `decode_attention`'s
kernel."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference
from pallas_kernels.attention.reference import KeyBlock
from pallas_kernels.decode_attention import KeyValues
from pallas_kernels.decode_attention import hopper as decode
from pallas_kernels.exact import with_gradient_of
from pallas_kernels.partition import partitioned


def cudnn_lacks(query, blocks, score_scale) -> str:
    """Say what cuDNN would need to serve a call; empty where it does."""
    kinds = {
        x.dtype.name for x in (query, *(x for block in blocks for x in (block.keys, block.values)))
    }
    if len(kinds) > 1 or not kinds <= {"bfloat16", "float16"}:
        return f"attention of {', '.join(sorted(kinds))} operands, but of bfloat16 or float16 ones"
    if not isinstance(score_scale, float):
        return "attention with a scale of scores that is not known at trace time"
    if query.shape[3] % 8 or query.shape[3] > 128:
        return f"attention with head_dim {query.shape[3]}, but with multiples of 8 up to 128"
    return ""


def cudnn_attention(query, blocks, score_scale, value_scale, out_dtype):
    """Run cuDNN's flash attention, with one block of keys a row and the masks as a bias."""
    b, t, heads, _ = query.shape

    def each_row(x):
        return jnp.repeat(jnp.swapaxes(x, 1, 2), b // len(x), axis=0)

    def mask_of(block):
        rows, slots = len(block.keys), block.mask.shape[-1]
        return jnp.broadcast_to(block.mask, (rows, b // rows * t, slots)).reshape(b, 1, t, slots)

    keys, values = (
        jnp.concatenate([each_row(x) for x in part], 1)
        for part in zip(*((k, v) for k, v, _ in blocks), strict=True)
    )
    mask = jnp.concatenate([mask_of(block) for block in blocks], -1)
    # with a bias, cuDNN's backward pass takes even lengths alone
    query, keys, values = (_pad_to_even(x, 1) for x in (query, keys, values))
    padded = _pad_to_even(_pad_to_even(mask, 2), 3)
    out = jax.nn.dot_product_attention(
        query, keys, values, mask=padded, scale=score_scale, implementation="cudnn"
    )[:, :t]
    if jnp.ndim(value_scale):
        value_scale = jnp.repeat(value_scale, heads // len(value_scale))[:, None]
    # where all is masked, cuDNN's softmax is uniform
    visible = mask.any(-1)[:, 0, :, None, None]
    return (jnp.where(visible, out, 0).astype(jnp.float32) * value_scale).astype(out_dtype)


def _pad_to_even(x, axis):
    extra = [(0, x.shape[axis] % 2 if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, extra) if x.shape[axis] % 2 else x


def decode_order_lacks(query, blocks) -> str:
    """Say what decode's kernel would need to serve a call; empty where it does."""
    return decode.lacks(query[:, 0], [_cache(block.keys, block.values) for block in blocks])


def decode_order_attention(query, blocks, score_scale, value_scale, out_dtype):
    """Run `decode_attention`'s kernel with limits for each query; the gradient is the reference's.

    A decode step's query attends to all keys of its row; here each query attends to those from its
    first to its last. Steps and chunks outside of that add zeros to its sums, and its references
    are integers, so they change none of its bits: what a token gets is what a decode step over the
    same keys, in the same blocks, gives it.
    """
    scales = [jnp.asarray(x, jnp.float32) for x in (score_scale, value_scale)]

    def plain(query, score_scale, value_scale, *arrays):
        return reference.attend(query, _blocks(arrays), score_scale, value_scale, out_dtype)

    run = with_gradient_of(plain, partial(_decode_order, out_dtype=out_dtype))
    return run(query, *scales, *(x for block in blocks for x in block))


def _blocks(arrays) -> list[KeyBlock]:
    return [KeyBlock(*arrays[i : i + 3]) for i in range(0, len(arrays), 3)]


def _cache(keys, values) -> KeyValues:
    return KeyValues(keys, values, jnp.full(len(keys), keys.shape[2], jnp.int32))


def _decode_order(query, score_scale, value_scale, *arrays, out_dtype):
    b, t, heads, dim = query.shape
    blocks = _blocks(arrays)
    limits, gaps = zip(*(_limits(block, b, t) for block in blocks), strict=True)
    # rows of every block are split over a mesh with the rows that all of them have in common
    lead, kv_heads = math.gcd(*(len(block.keys) for block in blocks)), blocks[0].keys.shape[1]
    scales = jnp.stack([jnp.broadcast_to(x, kv_heads) for x in (score_scale, value_scale)])
    grouped = query.reshape(lead, b // lead, t, kv_heads, heads // kv_heads, dim)
    limits = jnp.stack(limits).reshape(len(blocks), 2, lead, b // lead, t)
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
        out = decode.attend(flat, caches, bounds, scales[0], scales[1], out_dtype)
        return out.reshape(query.shape)

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


def _limits(block: KeyBlock, b: int, t: int):
    """The first slot that each query attends to, and the one after its last, int32 [2, b, t]; how
    many it does not attend to between."""
    rows, slots = len(block.keys), block.mask.shape[-1]
    some = block.mask.any(-1)
    first = jnp.where(some, block.mask.argmax(-1), slots)
    last = jnp.where(some, slots - block.mask[..., ::-1].argmax(-1), 0)
    gaps = jnp.where(some, last - first - block.mask.sum(-1), 0)
    first, last, gaps = (
        jnp.broadcast_to(x, (rows, b // rows * t)).reshape(b, t) for x in (first, last, gaps)
    )
    return jnp.stack([first, last]).astype(jnp.int32), gaps
