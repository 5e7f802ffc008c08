"""What `write_cache` is checked and timed with."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_write.api import write_cache
from pallas_kernels.check.cases import QWEN3_8B, QWEN3_30B_A3B, Case

E4M3, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32


def arguments(
    key,
    tokens: int,
    shape: tuple[int, int, int, int],
    heads: int,
    dtype: jnp.dtype,
    query_scale: bool,
    by_head: bool = False,
) -> tuple:
    """A cache of ones, tokens for places all over it and some for places outside, and scales that
    clamp the largest numbers."""
    rows, kv_heads, slots, dim = shape
    keys = jax.random.split(key, 5)
    places = jax.random.permutation(
        keys[0], jnp.arange(-slots, rows * slots + slots, dtype=jnp.int32)
    )[:tokens]
    row, slot = places // slots, jnp.where(places % 7 == 3, slots, places % slots)
    angles = jax.random.uniform(keys[1], (tokens, dim // 2), F32, 0.0, 100.0)
    k, v, q = (
        jax.random.normal(kind, (tokens, count, dim)).astype(BF16)
        for kind, count in zip(keys[2:], (kv_heads, kv_heads, heads), strict=True)
    )
    cache = jnp.ones(shape, dtype)
    scales = (jnp.float32(0.006), jnp.float32(0.0071)) if dtype != BF16 else ()
    scales += (jnp.float32(0.0063),) if query_scale else ()
    if by_head:
        scales = [scale * (1 + jnp.arange(kv_heads, dtype=F32)) for scale in scales]
    return (
        cache,
        cache,
        k,
        v,
        jnp.cos(angles),
        jnp.sin(angles),
        row,
        slot,
        *((q,) if heads else ()),
        *scales,
    )


def run(*arrays, heads: int, dtype: jnp.dtype, query_scale: bool, backend):
    cache, arrays = arrays[:8], list(arrays[8:])
    q = arrays.pop(0) if heads else None
    query_number = arrays.pop() if query_scale else None
    return write_cache(*cache, tuple(arrays) or None, q, query_number, backend=backend)


def expected(
    keys, values, k, v, cos, sin, row, slot, *more, heads: int, dtype: jnp.dtype, query_scale: bool
) -> tuple:
    """The definition in numpy, a token at a time."""
    q, scales = (more[0] if heads else None), list(more[1 if heads else 0 :])
    query_number = scales.pop() if query_scale else None
    rotated = [_rotated(x, cos, sin) for x in ((k, q) if heads else (k,))]
    keys, values = keys.astype(np.float32), values.astype(np.float32)
    k, v = (_cast(x, scales[i] if scales else None, dtype) for i, x in enumerate((rotated[0], v)))
    for t, (r, s) in enumerate(zip(row, slot, strict=True)):
        if 0 <= r < keys.shape[0] and 0 <= s < keys.shape[2]:
            keys[r, :, s], values[r, :, s] = k[t], v[t]
    return (keys, values, _cast(rotated[1], query_number, dtype)) if heads else (keys, values)


def _rotated(x, cos, sin):
    first, second = np.split(x.astype(np.float64), 2, -1)
    cos, sin = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return (
        np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        .astype(np.float32)
        .astype(x.dtype)
    )


def _cast(x, scale, dtype):
    if scale is None:
        return x.astype(np.float32)
    limit = np.float32(jnp.finfo(dtype).max)
    scale = np.repeat(scale, x.shape[1] // scale.size)[:, None]
    return np.clip(x.astype(np.float32) / scale, -limit, limit).astype(dtype).astype(np.float32)


def case(
    name: str,
    tokens: int,
    shape: tuple[int, int, int, int],
    heads: int = 0,
    dtype=E4M3,
    query_scale: bool = False,
    by_head: bool = False,
) -> Case:
    kind = {"heads": heads, "dtype": dtype, "query_scale": query_scale}
    moved = (
        tokens
        * shape[3]
        * (2 * shape[1] * (2 + jnp.dtype(dtype).itemsize) + heads * (3 if query_scale else 4))
    )
    return Case(
        name=name,
        arguments=partial(arguments, tokens=tokens, shape=shape, by_head=by_head, **kind),
        run=partial(run, **kind),
        expected=partial(expected, **kind),
        # a float32 sum of two products may be rounded once or twice, and tip a number to the
        # neighbouring value of the dtype
        tolerance=2.0**-8 if dtype == BF16 else 32 / 448,
        bytes=float(moved + tokens * shape[3] * 4),
    )


SMALL = (
    case("decode", 12, (5, 2, 16, 64), 4, query_scale=True),
    case("pages", 40, (6, 2, 8, 128)),
    case("prefill", 100, (3, 4, 48, 64), 4),
    case("bfloat16", 9, (4, 2, 8, 96), 2, BF16),
    case("bfloat16-head-dim-128", 9, (4, 2, 8, 128), 4, BF16),
    case("head-dim-96", 20, (4, 2, 8, 96), 2, query_scale=True),
    case("one-token", 1, (1, 1, 1, 64), 1),
    case("units-of-16", 12, (4, 1, 16, 64), 2),
    case("scales-by-head", 12, (5, 2, 16, 64), 8, query_scale=True, by_head=True),
    case("scales-by-head-of-pages", 100, (6, 3, 24, 128), 6, query_scale=True, by_head=True),
)

_MODELS = {model.name: model for model in (QWEN3_8B, QWEN3_30B_A3B)}
REAL = (
    *(
        case(
            f"decode-{name}-{tokens}",
            tokens,
            (tokens, model.kv_heads, 4096, 128),
            model.heads,
            query_scale=True,
        )
        for name, model in _MODELS.items()
        for tokens in (16, 256)
    ),
    case("decode-bfloat16", 64, (64, 8, 4096, 128), 32, BF16),
    case("prefill-real", 8192, (1024, 8, 64, 128), 32, query_scale=True),
    case("prefill-queries-not-quantized", 8192, (1024, 8, 64, 128), 32),
    case("prefill-bfloat16", 8192, (1024, 8, 64, 128), 32, BF16),
    case("head-dim-64", 256, (256, 8, 1024, 64), 32, query_scale=True),
    case("head-dim-96-real", 256, (256, 32, 1024, 96), 32, query_scale=True),
)
