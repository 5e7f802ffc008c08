"""Writing a KV cache in plain XLA: the definition of correct for every other backend."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.rounding import rounded


def write_cache(keys, values, k, v, cos, sin, row, slot, scales, q, query_scale):
    key_scale, value_scale = scales or (None, None)
    written = (
        scatter(keys, cast(rotate(k, cos, sin), key_scale, keys.dtype), row, slot),
        scatter(values, cast(v, value_scale, values.dtype), row, slot),
    )
    if q is None:
        return written
    return *written, cast(
        rotate(q, cos, sin), query_scale, q.dtype if query_scale is None else keys.dtype
    )


def rotate(x, cos, sin):
    """Rotary embedding of x [tokens, heads, head_dim] in the half-split layout, computed in
    float32."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return rounded(
        jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype
    )


def cast(x, scale, dtype):
    """x [tokens, heads, head_dim] / scale, [] or [kv_heads], clamped to the range of an FP8
    `dtype`; without a scale x in `dtype`."""
    if scale is None:
        return rounded(x, dtype)
    if scale.ndim:
        scale = jnp.repeat(scale, x.shape[1] // len(scale))[:, None]
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(dtype)


def scatter(cache, new, row, slot):
    """new [tokens, heads, head_dim] at (row, slot) of cache [rows, heads, slots, head_dim]; what
    lies outside is dropped."""
    rows, _, slots, _ = cache.shape
    inside = (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots)
    return cache.at[jnp.where(inside, row, rows), :, slot].set(new, mode="drop")
