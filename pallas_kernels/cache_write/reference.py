"""Writing a KV cache in plain XLA: the definition of correct for every other backend."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.qtensor import moved
from pallas_kernels.quantize.reference import to_float8
from pallas_kernels.rounding import rounded


def write_cache(keys, values, k, v, cos, sin, row, slot, scales, q, query_scale, dtype):
    key_scale, value_scale = scales or (None, None)
    written = (
        scatter(keys, cast(rotate(k, cos, sin), key_scale, dtype), row, slot),
        scatter(values, cast(v, value_scale, dtype), row, slot),
    )
    if q is None:
        return written
    return *written, cast(
        rotate(q, cos, sin), query_scale, q.dtype if query_scale is None else dtype
    )


def rotate(x, cos, sin):
    """Rotate x [tokens, heads, head_dim] by rotary embedding, half-split layout, in float32."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return rounded(
        jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype
    )


def cast(x, scale, dtype):
    """Divide x [tokens, heads, head_dim] by scale, [] or [kv_heads], clamp and cast it to FP8.

    Without a scale it is x in `dtype`.
    """
    if scale is None:
        return rounded(x, dtype)
    if scale.ndim:
        scale = jnp.repeat(scale, x.shape[1] // len(scale))[:, None]
    limit = float(jnp.finfo(dtype).max)
    return to_float8(jnp.clip(x.astype(jnp.float32) / scale, -limit, limit), dtype)


def scatter(cache, new, row, slot):
    """Write new [tokens, heads, head_dim] to (row, slot) of cache [rows, heads, slots, head_dim].

    What lies outside is dropped.
    """
    rows, _, slots, _ = cache.shape
    inside = (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots)
    place = (jnp.where(inside, row, rows), slice(None), slot)
    new = new.astype(cache.dtype)
    return moved(lambda cache, new: cache.at[place].set(new, mode="drop"), cache, new)


def move(cache, source, target):
    """Copy tokens of cache [rows, heads, slots, head_dim] from places, row * slots + slot, to
    others.

    What goes outside is dropped.
    """
    slots = cache.shape[2]
    taken = moved(lambda x: x.at[source // slots, :, source % slots].get(mode="clip"), cache)
    return scatter(cache, taken, target // slots, target % slots)
