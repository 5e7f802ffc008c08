"""Decode attention in plain XLA: whole scores and one softmax, over the cache's rows as they lie,
or over gathered pages."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import KeyBlock, attend


def decode_attention(query, caches, score_scale, value_scale, window, out_dtype):
    starts = first_visible([known_lengths(cache) for cache in caches], len(query), window)
    blocks = [_block(cache, start) for cache, start in zip(caches, starts, strict=True)]
    return attend(query[:, None], blocks, score_scale, value_scale, out_dtype)[:, 0]


def page_of(cache) -> tuple[int, int]:
    """Count the slots of a page, and the pages of a cache row."""
    slots = cache.keys.shape[2]
    page = cache.page_size or slots
    return page, -(-slots // page)


def known_lengths(cache):
    """Clip lengths to the table."""
    page, _ = page_of(cache)
    return jnp.clip(cache.lengths, 0, page * (1 if cache.pages is None else cache.pages.shape[1]))


def first_visible(lengths, sequences, window):
    """Find the first key in each cache that each sequence attends to, within a window.

    Returns:
        int32 [rows, sequences of a row] for each cache; None without a window.
    """
    if window is None:
        return [None] * len(lengths)
    total = jnp.asarray(sum(jnp.repeat(length, sequences // len(length)) for length in lengths))
    starts, before = [], 0
    for length in lengths:
        starts.append((total - window - before).reshape(len(length), -1))
        before = before + jnp.repeat(length, sequences // len(length))
    return starts


def _block(cache, start) -> KeyBlock:
    keys, values, held = _rows(cache)
    slots = jnp.arange(keys.shape[2])
    visible = (slots < known_lengths(cache)[:, None])[:, None] if held is None else held[:, None]
    visible = visible if start is None else visible & (slots >= start[..., None])
    return KeyBlock(
        keys, values, lax.optimization_barrier(visible)
    )  # made once, not for every head


def _rows(cache):
    """Keys and values of each row of the table, and which of them it holds where that is more than
    a length."""
    if cache.pages is None:
        return cache.keys, cache.values, None
    page, per_row = page_of(cache)
    cache_rows, _, slots, _ = cache.keys.shape
    rows = len(cache.pages)
    at = cache.pages[..., None] % per_row * page + jnp.arange(page)
    real = (cache.pages >= 0) & (cache.pages < cache_rows * per_row)
    held = (real[..., None] & (at < slots)).reshape(rows, -1)
    held &= jnp.arange(held.shape[1]) < known_lengths(cache)[:, None]
    row = jnp.clip(cache.pages // per_row, 0, cache_rows - 1)[..., None]

    def gather(x):
        # [rows, pages, page, kv_heads, head_dim]
        x = jnp.moveaxis(x, 1, 2)[row, jnp.clip(at, 0, slots - 1)]
        return jnp.moveaxis(x.reshape(rows, -1, *x.shape[3:]), 1, 2)

    return gather(cache.keys), gather(cache.values), held
