"""Decode attention in plain XLA.

A cache without pages is attended to as it lies. Of a small page table every entry is loaded at
once. Of a larger one the entries that hold something to see are listed and taken a block at a time,
with a softmax that goes on from block to block (Milakov and Gimelshein, arXiv 1805.02867): the work
follows the tokens that are there, not the size of the table.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import per_kv_head
from pallas_kernels.rounding import full_precision, rounded

_BLOCK = 4096
"""Slots of a block of pages."""
_HIDDEN = -1e30
"""Score of a key that is not attended to."""


class _Softmax(NamedTuple):
    """Attention to some of the keys, float32.

    The largest score and the sum of weights, [rows, kv_heads, queries, 1], and the weighted values,
    [rows, kv_heads, queries, head_dim]. A row's queries are the heads of a group, of all sequences
    that share the row.
    """

    top: jax.Array
    total: jax.Array
    out: jax.Array

    def rescaled(self, top) -> _Softmax:
        """The same, with weights relative to another score."""
        factor = jnp.exp(self.top - top)
        return _Softmax(top, self.total * factor, self.out * factor)

    def plus(self, other: _Softmax) -> _Softmax:
        """Attention to the keys of both."""
        top = jnp.maximum(self.top, other.top)
        one, two = self.rescaled(top), other.rescaled(top)
        return _Softmax(top, one.total + two.total, one.out + two.out)


class _Table(NamedTuple):
    """Pages of each row.

    Attributes:
        pages: page numbers [rows, entries], all of them inside the pool.
        end: a query sees the slots of an entry before this one, [rows, entries].
        begin: and those from this one on, [rows, entries, queries]; None: from 0.
    """

    pages: jax.Array
    end: jax.Array
    begin: jax.Array | None


def decode_attention(query, caches, score_scale, value_scale, window, out_dtype):
    sequences, heads, dim = query.shape
    kv_heads = caches[0].keys.shape[1]
    grouped = query.reshape(sequences, kv_heads, heads // kv_heads, dim)
    grouped = _widen(grouped) * per_kv_head(score_scale, 2)
    precision = full_precision(grouped, out_dtype)
    starts = first_visible([known_lengths(cache) for cache in caches], sequences, window)
    found, tables = [], {}
    for cache, start in zip(caches, starts, strict=True):
        if start is not None:
            start = jnp.repeat(start, heads // kv_heads, axis=1)
        if cache.pages is None:
            visible = _visible(cache.keys.shape[2], known_lengths(cache), start)
            own = _by_row(grouped, len(cache.keys))
            found.append(_attend(own, cache.keys, cache.values, visible, precision))
        else:  # caches in one pool are one table
            pool = id(cache.keys), id(cache.values), cache.page_size, len(cache.lengths)
            tables.setdefault(pool, []).append((cache, _table(cache, start)))
    for members in tables.values():
        cache = members[0][0]
        table = jax.tree.map(lambda *x: jnp.concatenate(x, 1), *(table for _, table in members))
        pools = [_in_pages(x, cache.page_size) for x in (cache.keys, cache.values)]
        own = _by_row(grouped, len(cache.lengths))
        found.append(_attend_pages(own, pools, table, precision))
    found = [_Softmax(*(_by_sequence(x, sequences) for x in part)) for part in found]
    _, total, out = reduce(_Softmax.plus, found)
    # a query that attends to nothing has the output 0
    out = out * (per_kv_head(value_scale, 2) / jnp.where(total == 0, 1.0, total))
    return rounded(out.reshape(query.shape), out_dtype)


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


def _table(cache, start) -> _Table:
    page, per_row = page_of(cache)
    pages = jnp.clip(cache.pages, 0, len(cache.keys) * per_row - 1)
    first = jnp.arange(pages.shape[1]) * page
    there = cache.keys.shape[2] - pages % per_row * page  # the last page of a row may be short
    end = jnp.minimum(known_lengths(cache)[:, None] - first, there)
    begin = None if start is None else start[:, None] - first[:, None]
    return _Table(pages, jnp.where(pages == cache.pages, end, 0), begin)


def _attend_pages(query, pools, table: _Table, precision) -> _Softmax:
    rows, page = len(table.pages), pools[0].shape[2]

    def attend(query, entries: _Table) -> _Softmax:
        keys, values = (pool.at[entries.pages].get(mode="clip") for pool in pools)
        visible = _visible(page, entries.end, entries.begin)
        return _attend(query, keys, values, visible, precision)

    if table.pages.size * page <= _BLOCK:
        return attend(query, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), table))

    held = table.end > 0
    if table.begin is not None:
        held &= table.begin.min(2) < page
    block = max(1, _BLOCK // page)
    size = -(-held.size // block) * block
    listed, count = jnp.nonzero(held, size=size, fill_value=rows), held.sum()

    def body(carry):
        place, sums = carry
        row, entry = (lax.dynamic_slice_in_dim(x, place, block) for x in listed)
        entries = jax.tree.map(lambda x: x.at[row, entry].get(mode="clip"), table)
        entries = entries._replace(end=jnp.where(row < rows, entries.end, 0))
        found = attend(query.at[row].get(mode="clip"), entries)
        top = sums.top.at[row].max(found.top, mode="drop")
        sums, found = sums.rescaled(top), found.rescaled(top.at[row].get(mode="clip"))
        total = sums.total.at[row].add(found.total, mode="drop")
        return place + block, _Softmax(top, total, sums.out.at[row].add(found.out, mode="drop"))

    zero = jnp.zeros((*query.shape[:3], 1), jnp.float32)
    nothing = _Softmax(zero + _HIDDEN, zero, jnp.zeros_like(query))
    return lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), nothing))[1]


def _attend(query, keys, values, visible, precision) -> _Softmax:
    """Attend to blocks of keys, as many for each row, one row's after the other's.

    Args:
        query: [rows, kv_heads, queries, head_dim].
        keys, values: [rows * blocks, kv_heads, slots, head_dim].
        visible: [rows * blocks, queries or 1, slots].
    """
    blocks, visible = len(keys) // len(query), visible[:, None]

    def split(x):
        return x.reshape(len(query), blocks, *x.shape[1:]) if blocks > 1 else x

    keys_of_row = (1, 4) if blocks > 1 else 3
    rows = jnp.repeat(query, blocks, axis=0)
    scores = jnp.einsum("rkqd,rksd->rkqs", rows, _widen(keys), precision=precision)
    scores = split(jnp.where(visible, scores, _HIDDEN))
    top = scores.max(keys_of_row, keepdims=True)
    weights = jnp.where(split(visible), jnp.exp(scores - top), 0.0)
    total = weights.sum(keys_of_row, keepdims=True)
    weights = weights.reshape(len(keys), *weights.shape[-3:])
    out = split(jnp.einsum("rkqs,rksd->rkqd", weights, _widen(values), precision=precision))
    return _Softmax(top[:, 0], total[:, 0], out.sum(1)) if blocks > 1 else _Softmax(top, total, out)


def _visible(slots: int, end, begin):
    """Mark the slots [rows, queries or 1, slots] from `begin` [rows, queries] to `end` [rows]."""
    slot = jnp.arange(slots)
    visible = (slot < end[:, None])[:, None]
    return visible if begin is None else visible & (slot >= begin[..., None])


def _in_pages(x, page: int):
    """Split the slots of cache rows into pages, [pages, kv_heads, page, head_dim]."""
    _, kv_heads, slots, dim = x.shape
    if slots == page:
        return x
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -slots % page), (0, 0)))
    x = x.reshape(len(x), kv_heads, -1, page, dim)
    return jnp.moveaxis(x, 2, 1).reshape(-1, kv_heads, page, dim)


def _by_row(x, rows: int):
    """Bring [sequences, kv_heads, group, d] to [rows, kv_heads, queries, d]."""
    x = x.reshape(rows, -1, *x.shape[1:])
    return jnp.swapaxes(x, 1, 2).reshape(rows, x.shape[2], -1, x.shape[4])


def _by_sequence(x, sequences: int):
    """Undo `_by_row`."""
    rows, kv_heads, _, dim = x.shape
    x = x.reshape(rows, kv_heads, sequences // rows, -1, dim)
    return jnp.swapaxes(x, 1, 2).reshape(sequences, kv_heads, -1, dim)


def _widen(x):
    """Make float32 of any dtype of a cache; of e4m3 by its bits, which a CPU does faster than the
    cast."""
    if x.dtype != jnp.float8_e4m3fn:
        return x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint16)
    half = (bits & 0x80) << 8 | (bits & 0x7F) << 7  # exponent bias 15 instead of 7
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) * 256
