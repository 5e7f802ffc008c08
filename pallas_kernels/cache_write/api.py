"""Writing new keys and values into a KV cache: rotate, scale, clamp, cast and scatter; and moving
what is there."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import Backend, choose
from pallas_kernels.cache_write import reference

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def write_cache(
    keys: Float[Array, "rows kv_heads slots head_dim"],
    values: Float[Array, "rows kv_heads slots head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    row: Int[Array, " tokens"],
    slot: Int[Array, " tokens"],
    scales: tuple[Array, Array] | None = None,
    q: Float[Array, "tokens heads head_dim"] | None = None,
    query_scale: Float[Array, ...] | None = None,
    *,
    fp8_dtype: jnp.dtype | None = None,
    backend: Backend = "auto",
) -> tuple[Array, ...]:
    """Write new keys and values into a KV cache: rotate, scale, clamp, cast and scatter.

    keys[row, :, slot] = cast(clamp(rotate(k) / scale)), and so values, without the rotation.

    A paged cache is the case in which `rows` are pages of `slots` tokens. Layers stacked before the
    rows are rows, too: reshape the cache and add layer * rows to `row`. Arrays that the caller
    donates, or carries through a loop, are written in place. Where a mesh splits them, call this
    inside a `jax.shard_map`, with each device's own rows and heads: XLA cannot split the kernel.

    Args:
        keys, values: the cache, of one dtype: bfloat16 or float32 as it is, or FP8 with `scales`;
            with `fp8_dtype`, too, a float32 one of FP8 values, which the reference's attention
            reads without converting them.
        k, v: new keys and values, before rotation; one dtype, bfloat16 on hopper. `v` is not
            rotated.
        cos, sin: float32, of each token's angles: the half-split rotary embedding (arXiv
            2104.09864), computed in float32 and rounded to the dtype of `k`.
        row, slot: int32, where each token goes. A token whose row or slot lies outside of the cache
            is dropped. Two tokens for one place leave either of them.
        scales: float32 [] or [kv_heads], of keys and values (x is about stored * scale); they are
            data, so a new one compiles nothing.
        q: queries of the same tokens, rotated in the same kernel; `heads` is a multiple of
            `kv_heads`.
        query_scale: float32 [] or [kv_heads], of the group of queries of each KV head; with it the
            queries are divided, clamped and cast as well.
        fp8_dtype: what is quantized is cast to this; None: to the dtype of the cache.
        backend: implementation; hopper takes head_dim 64, 96 and 128, "auto" is the reference for
            others.

    Returns:
        keys, values, and the rotated queries where there are any.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: shapes or dtypes do not belong to each other, or there are no tokens.
    """
    dtype = keys.dtype if fp8_dtype is None else jnp.dtype(fp8_dtype)
    _check(keys, values, k, v, cos, sin, row, slot, scales, q, query_scale, dtype)
    if _chosen(backend, keys, k) == "reference":
        return reference.write_cache(
            keys, values, k, v, cos, sin, row, slot, scales, q, query_scale, dtype
        )
    from pallas_kernels.cache_write import hopper

    numbers = jnp.stack(
        [
            jnp.broadcast_to(jnp.float32(1) if x is None else x, keys.shape[1])
            for x in (*(scales or (None, None)), query_scale)
        ]
    )
    kernel = partial(
        hopper.write_cache, scaled=scales is not None, query_scaled=query_scale is not None
    )
    arrays = (keys, values, k, v, cos, sin, row, slot, numbers)
    if q is None:
        return kernel(*arrays)
    *cache, rotated = kernel(*arrays, q.reshape(len(q), k.shape[1], -1, q.shape[2]))
    return *cache, rotated.reshape(q.shape)


def move_tokens(
    cache: Float[Array, "rows kv_heads slots head_dim"],
    source: Int[Array, " tokens"],
    target: Int[Array, " tokens"],
) -> Float[Array, "rows kv_heads slots head_dim"]:
    """Copy keys or values of some tokens to other places of their cache, by XLA on every backend.

    An array that the caller donates is written in place.

    Args:
        cache: of any dtype; its numbers are copied as they are.
        source, target: int32 places, row * slots + slot. A target outside of the cache is dropped;
            all reads come before the writes.
    """
    return reference.move(cache, source, target)


def _check(keys, values, k, v, cos, sin, row, slot, scales, q, query_scale, dtype):
    _, kv_heads, _, head_dim = keys.shape
    tokens = len(k)
    wanted = {
        "values": (values, keys.shape, keys.dtype),
        "k": (k, (tokens, kv_heads, head_dim), k.dtype),
        "v": (v, (tokens, kv_heads, head_dim), k.dtype),
        "cos": (cos, (tokens, head_dim // 2), jnp.float32),
        "sin": (sin, (tokens, head_dim // 2), jnp.float32),
        "row": (row, (tokens,), jnp.int32),
        "slot": (slot, (tokens,), jnp.int32),
    }
    if q is not None:
        wanted["q"] = (q, (tokens, q.shape[1] // kv_heads * kv_heads, head_dim), k.dtype)
    numbers = (*(scales or (None, None)), query_scale)
    for name, number in zip(("key scale", "value scale", "query_scale"), numbers, strict=True):
        if number is not None:
            wanted[name] = (number, (kv_heads,) if number.ndim else (), jnp.float32)
    for name, (given, shape, kind) in wanted.items():
        if given.shape != shape or given.dtype != kind:
            raise ValueError(
                f"write_cache: {name} is {given.dtype}{given.shape}, must be "
                f"{jnp.dtype(kind)}{shape} for a cache {keys.shape}"
            )
    if tokens == 0 or head_dim % 2:
        raise ValueError(f"write_cache: needs tokens and an even head_dim, got k {k.shape}")
    if (dtype.name in _FP8) != (scales is not None) or (query_scale is not None and scales is None):
        raise ValueError(
            f"write_cache: an FP8 cache needs scales, and no other has them; the cache is {dtype}"
        )
    if keys.dtype not in (dtype, jnp.float32):
        raise ValueError(
            f"write_cache: {dtype} values are kept in a cache of that dtype or of float32, not of "
            f"{keys.dtype}"
        )


def _chosen(backend, keys, k) -> str:
    head_dim = keys.shape[-1]
    served = (
        head_dim in (64, 96, 128)
        and k.dtype == jnp.bfloat16
        and keys.dtype.name in (*_FP8, "bfloat16")
    )
    return choose(
        "write_cache",
        backend,
        "" if served else f"write of {k.dtype} heads of {head_dim} into {keys.dtype}",
    )
