"""Part `attention`: decode attention over paged caches, FP8 and bfloat16, against cuDNN's and XLA's
in bfloat16."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.timing import Work, compare, median_ratio
from pallas_kernels.check.cases import QWEN3_8B, Case, Shape
from pallas_kernels.decode_attention import KeyValues, decode_attention

OURS, OURS_BF16, CUDNN, XLA = "fp8 cache", "bf16 cache", "cuDNN bf16", "XLA bf16"
BF16_WAYS = (OURS_BF16, CUDNN, XLA)
# without 256 x 32768: its cache is 34 GB in bfloat16, and three sides have one each
GRID = (
    (64, 8192),
    (16, 2048),
    (16, 8192),
    (256, 8192),
    (64, 2048),
    (256, 2048),
    (64, 32768),
    (16, 32768),
)
FIRST = ((64, 8192), (16, 2048))
PAGE = 64
TINY_MODEL = Shape("tiny", 64, 64, 4, 2, 64)


def jobs(setting: Setting) -> list[Job]:
    """The grid of batches and contexts at Qwen3-8B's heads, then the operation's own real cases."""
    model, grid = (TINY_MODEL, ((2, 130),)) if setting.tiny else (QWEN3_8B, GRID)
    job = partial(
        Job,
        sources=(__name__, "pallas_kernels.decode_attention.cases"),
        operation="decode_attention",
    )
    points = [
        job(f"{b}x{c}", partial(point, setting, model, b, c), first=(b, c) in FIRST)
        for b, c in grid
    ]
    return [
        *points,
        *(
            job(case.name, partial(_case, setting, case))
            for case in setting.cases("decode_attention", "real")
        ),
    ]


def point(setting: Setting, model: Shape, batch: int, context: int) -> dict[str, Any]:
    """One batch and context: each sequence has as many keys."""
    e4m3, bf16 = jnp.float8_e4m3fn, jnp.bfloat16
    rows = partial(_rows, model, batch, context)
    works = {
        OURS: Work(partial(_ours, setting, context), partial(_pages, model, batch, context, e4m3)),
        OURS_BF16: Work(
            partial(_ours, setting, context), partial(_pages, model, batch, context, bf16)
        ),
        XLA: Work(partial(_peer, "xla"), rows),
    }
    if not setting.tiny:
        works[CUDNN] = Work(partial(_peer, "cudnn"), rows)
    flops = 4.0 * batch * model.heads * context * model.head_dim
    result = compare(
        setting, works, (OURS,), flops, float(_cache_bytes(model, batch, context, e4m3))
    )
    ratios = [ratio for way in BF16_WAYS if (ratio := median_ratio(result, way, OURS)) is not None]
    return result | {
        "batch": batch,
        "context": context,
        "best_bf16_over_ours": min(ratios, default=None),
    }


def _cache_bytes(model: Shape, batch: int, context: int, dtype: jnp.dtype) -> int:
    return 2 * batch * context * model.kv_heads * model.head_dim * jnp.dtype(dtype).itemsize


def _pages(model: Shape, batch: int, context: int, dtype: jnp.dtype, key: jax.Array) -> tuple:
    """Query, pages of keys and of values, lengths, and a page table in no order; scales of e4m3 at
    the end."""
    table = -(-context // PAGE)
    keys = jax.random.split(key)
    query = jax.random.normal(keys[0], (batch, model.heads, model.head_dim)).astype(dtype)
    shape = (batch * table, model.kv_heads, PAGE, model.head_dim)
    cache = _keys_and_values(keys[1], shape, dtype)
    order = (
        np.random.default_rng(0).permutation(batch * table).reshape(batch, table).astype(np.int32)
    )
    scales = (jnp.float32(1.0),) * 3 if dtype == jnp.float8_e4m3fn else ()
    return query, *cache, jnp.full((batch,), context, jnp.int32), jnp.asarray(order), *scales


def _keys_and_values(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Normal data, some rows at a time: all of it at once would need many times its own memory."""
    some = math.gcd(shape[0], 8)

    def draw(k):
        return tuple(jax.random.normal(k, (2, some, *shape[1:])).astype(dtype))

    keys, values = jax.lax.map(draw, jax.random.split(key, shape[0] // some))
    return keys.reshape(shape), values.reshape(shape)


def _ours(setting: Setting, context: int, query, keys, values, lengths, pages, *scales):
    cache = KeyValues(keys, values, lengths, pages, PAGE)
    return decode_attention(
        query, (cache,), query.shape[-1] ** -0.5, *scales, backend=setting.backend
    )


def _rows(model: Shape, batch: int, context: int, key: jax.Array) -> tuple:
    """The layout that cuDNN and XLA like best: a sequence's keys one after the other."""
    keys = jax.random.split(key)
    query = jax.random.normal(keys[0], (batch, 1, model.heads, model.head_dim)).astype(jnp.bfloat16)
    return query, *_keys_and_values(
        keys[1], (batch, context, model.kv_heads, model.head_dim), jnp.bfloat16
    )


def _peer(implementation: str, query, keys, values):
    return jax.nn.dot_product_attention(query, keys, values, implementation=implementation)


def _case(setting: Setting, case: Case) -> dict[str, Any]:
    works = {OURS: Work(lambda *a: case.run(*a, backend=setting.backend), case.arguments)}
    return compare(setting, works, (), case.flops, case.bytes)
