"""Attention of one query token a sequence over cached keys and values, in pages or in rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.reference import check_scale
from pallas_kernels.backend import Backend, choose, resolve
from pallas_kernels.decode_attention import cpu, reference

OPERATION = "decode_attention"


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["page_size"],
    data_fields=["keys", "values", "lengths", "pages"],
)
@dataclass(frozen=True)
class KeyValues:
    """A cache and what of it each row of a page table holds.

    The slots of a cache row are split into pages of `page_size`, the last one shorter where they do
    not fit: page p is slots (p % c) * page_size and on of cache row p // c, with c = ceil(slots /
    page_size). A paged cache has one page a cache row.

    Attributes:
        keys, values: [cache rows, kv_heads, slots, head_dim], bfloat16, float16, float32 or e4m3.
            No slot that is loaded may hold a NaN or an infinity, not even one that no query reads.
        lengths: int32 [rows]: keys that a row holds, the first ones of its pages. Below 0 counts as
            0, and what goes beyond the table as its end.
        pages: int32 [rows, pages] of page numbers. The keys of a number outside the cache are not
            attended to, nor are slots that a short last page does not have. None: row r holds cache
            row r.
        page_size: slots of a page; None, only without `pages`: all of a cache row.
    """

    keys: Float[Array, "cache_rows kv_heads slots head_dim"]
    values: Float[Array, "cache_rows kv_heads slots head_dim"]
    lengths: Int[Array, " rows"]
    pages: Int[Array, "rows pages"] | None = None
    page_size: int | None = field(default=None)


def decode_attention(
    query: Float[Array, "sequences heads head_dim"],
    caches: tuple[KeyValues, ...],
    score_scale: float,
    query_scale: Float[Array, ...] | None = None,
    key_scale: Float[Array, ...] | None = None,
    value_scale: Float[Array, ...] | None = None,
    window: Int[Array, ...] | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    *,
    backend: Backend = "auto",
) -> Float[Array, "sequences heads head_dim"]:
    """Compute attention of one query a sequence over its cached keys, with float32 scores and sums.

    softmax(score_scale * query_scale * key_scale * q . k) . v * value_scale.

    A sequence's keys are those of its row in the first cache, then those of its row in the next
    one: its prompt's, kept for all samples together, and its own. A cache with fewer rows than
    sequences is shared: row r holds the keys of sequences r * n to r * n + n - 1. The query stands
    at the last key. A sequence without a key has the output 0.

    On Hopper, weights are float16 for e4m3 values and in the values' dtype otherwise, keys are
    joined in chunks counted from a row's first key, and a sequence's bits depend on its own keys
    and the page size alone (Flash-Decoding's split, Dao et al., 2023; scales as in
    FlashAttention-3, arXiv 2407.08608, section 3.3). It takes head_dim 64, 96 and 128, queries and
    keys of one dtype, pages of a multiple of 64 slots, or one page a row; a cache whose rows have
    no multiple of 8 slots is copied first. Where a mesh splits the cache, call this inside a
    `jax.shard_map`, with each device's own rows and heads: XLA cannot split the kernel.

    Args:
        query: after rotation; e4m3 where the keys are.
        caches: one or more, in the order of their positions.
        score_scale: the model's, mostly 1 / sqrt(head_dim).
        query_scale, key_scale, value_scale: float32 [] or [kv_heads], of quantized queries, keys
            and values; a query's is that of its KV head's group. Arrays, so that they may change at
            each step.
        window: int32 scalar; a query attends to this many positions, its own included; None: all.
        out_dtype: of the result.
        backend: implementation. "auto" takes the reference where the Hopper kernel does not serve
            the call, and so does "cpu", whose kernel wants a head_dim that is a multiple of 16.

    Raises:
        BackendError: a backend asked for by name cannot serve the call.
        ValueError: shapes that do not belong together, no sequence, or scales neither [] nor
            [kv_heads].
    """
    _check(query, caches, (query_scale, key_scale, value_scale), window)
    score, value = (
        combine_score_scales(score_scale, query_scale, key_scale),
        1.0 if value_scale is None else value_scale,
    )
    inputs = (query, caches, score, value, window, out_dtype)
    chosen = resolve(backend, OPERATION)
    if chosen != "hopper":
        served = chosen == "cpu" and not cpu.lacks(caches)
        return (cpu if served else reference).decode_attention(*inputs)
    # importing Pallas takes longer than importing JAX
    from pallas_kernels.decode_attention import hopper

    if choose(OPERATION, backend, hopper.lacks(query, caches)) == "reference":
        return reference.decode_attention(*inputs)
    return hopper.decode_attention(*inputs)


def whole_slots(slots: int, backend: Backend = "auto") -> int:
    """Round up to the slots that a row of a cache should have, which a loop reads at every step.

    A multiple of 8 on Hopper, where any other cache is copied at every call; elsewhere as many as
    are asked for.
    """
    return -(-slots // 8) * 8 if resolve(backend, OPERATION) == "hopper" else slots


def combine_score_scales(score_scale: float, query_scale, key_scale):
    """Multiply the scales of scores, None where operands have none."""
    factor = score_scale if key_scale is None else score_scale * key_scale
    return factor if query_scale is None else factor * query_scale


def _check(query, caches, scales, window):
    sequences, heads, head_dim = query.shape
    if not sequences or not caches:
        raise ValueError(
            f"{OPERATION}: {sequences} sequences and {len(caches)} caches; it takes one at least "
            "of each"
        )
    for scale in scales:
        check_scale(OPERATION, 1.0 if scale is None else scale, caches[0].keys.shape[1])
    if window is not None and jnp.shape(window) != ():
        raise ValueError(f"{OPERATION}: window is a scalar, not of shape {jnp.shape(window)}")
    for cache in caches:
        shape, (rows,) = cache.keys.shape, cache.lengths.shape
        if cache.values.shape != shape or shape[3] != head_dim or heads % shape[1]:
            raise ValueError(
                f"{OPERATION}: query {query.shape}, keys {shape} and values {cache.values.shape} "
                "do not fit"
            )
        if not rows or sequences % rows:
            raise ValueError(f"{OPERATION}: {sequences} sequences cannot share {rows} rows evenly")
        if cache.pages is None and (rows != shape[0] or cache.page_size is not None):
            raise ValueError(
                f"{OPERATION}: {rows} rows of {shape[0]} cache rows in pages of "
                f"{cache.page_size} need `pages`"
            )
        if cache.pages is not None and (
            len(cache.pages) != rows or not cache.pages.shape[1] or not cache.page_size
        ):
            raise ValueError(
                f"{OPERATION}: pages {cache.pages.shape} of size {cache.page_size} do not fit "
                f"{rows} rows"
            )
        if cache.lengths.dtype != jnp.int32 or (
            cache.pages is not None and cache.pages.dtype != jnp.int32
        ):
            raise ValueError(f"{OPERATION}: lengths and pages are int32")
