"""Attention of many queries on Hopper: cuDNN's, with one block of keys a row and the masks as a
bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def lacks(query, blocks, score_scale) -> str:
    """What cuDNN would need to serve a call; empty where it does."""
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


def attention(query, blocks, score_scale, value_scale, out_dtype):
    b, t, _, _ = query.shape

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
    query, keys, values = (_even(x, 1) for x in (query, keys, values))
    padded = _even(_even(mask, 2), 3)
    out = jax.nn.dot_product_attention(
        query, keys, values, mask=padded, scale=score_scale, implementation="cudnn"
    )[:, :t]
    if jnp.ndim(value_scale):
        value_scale = jnp.repeat(value_scale, query.shape[2] // len(value_scale))[:, None]
    # where all is masked, cuDNN's softmax is uniform
    seen = mask.any(-1)[:, 0, :, None, None]
    return (jnp.where(seen, out, 0).astype(jnp.float32) * value_scale).astype(out_dtype)


def _even(x, axis):
    extra = [(0, x.shape[axis] % 2 if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, extra) if x.shape[axis] % 2 else x
