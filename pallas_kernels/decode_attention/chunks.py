"""Attention of one query token a sequence on Hopper: a block takes a chunk of a sequence's keys for
all queries that read it.

Chunks are `CHUNK` keys from the sequence's first key on, whatever the batch is; a block's two
consumers take its steps of 64 keys in turns and join what they have. Each chunk leaves its sum of
weights and weighted values in float32, for weights 2^(score - reference) whose reference is the
largest score, rounded: an integer, so that going over to another reference rounds nothing. They are
joined in the order of the chunks. A sequence's output depends on its own keys and their number, and
on no neighbour, slot or page number.

All queries of a key head, those of every sequence that shares the keys included, are rows of one
wgmma: 64 rows, of which a decode step often fills 4 or 8. It is bound by the loads of keys and
values. The product with few columns (S^T = K Q^T) would waste less, but its maximum over rows
crosses warps, for which Mosaic has one scratch for all warpgroups of a block.

A prefill is many queries of a row, each with limits of its own. A step that a query does not see
has the reference that it came with and weights of zero: it multiplies by 2^0 and adds zeros, and
changes no bit.

Keys meet queries in their own format, e4m3 or 16 bits: a head's 128 products at most are one sum in
the tensor core. Weights are float16 for e4m3 values, which become float16 on the way (exactly),
else the values' own 16 bits; the sums are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.decode_attention.consume import consume
from pallas_kernels.decode_attention.memory import Memory, memory_of
from pallas_kernels.decode_attention.produce import produce
from pallas_kernels.decode_attention.tiles import CHUNK, CONSUMERS, Sizes, over_tiles, tile_of


@mosaic.outlined("page", "slots")
def partials(query, keys, values, pages, spans, first, last, scale, *, page, slots):
    """What each chunk leaves: undefined where a part of a row's queries does not take it.

    Args:
        query: [rows, kv_heads, queries, head_dim], all queries that read a row's keys: a multiple
            of 8, above 64 of 64.
        keys, values: [cache rows, kv_heads, slots, head_dim].
        pages: int32 [rows, pages], -1 where there is none.
        spans: of the rows, as `spans_of` has them, within the pages.
        first, last: int32 [rows, queries], the first key that each query sees, and the first beyond
            its last; or None.
        scale: float32 [kv_heads], of scores, times log2(e).
        page, slots: slots of a page, and of a cache row without its padding.

    Returns:
        References and sums of weights, float32 [chunks, rows, kv_heads, 2, queries]; weighted
        values, [..., queries, dim].
    """
    rows, kv_heads, queries, head_dim = query.shape
    at = Sizes(rows, kv_heads, queries, head_dim, page, pages.shape[1], slots)
    limits, lead = (
        tuple(limit for limit in (first, last) if limit is not None),
        (at.chunks, rows, kv_heads),
    )
    bounded = (first is not None, last is not None)
    out = (
        jax.ShapeDtypeStruct((*lead, 2, queries), jnp.float32),
        jax.ShapeDtypeStruct((*lead, queries, head_dim), jnp.float32),
    )
    memory, stages = memory_of(at, query.dtype, keys.dtype, values.dtype, len(limits))

    def body(query, keys, values, pages, spans, longest, scale, *rest, memory):
        *limits, stats, sums = rest
        memory, wg = Memory(*memory), lax.axis_index("wg")
        tiles = lax.div(longest[0] + CHUNK - 1, CHUNK) * (rows * kv_heads * at.parts)

        def over(one, init):
            return over_tiles(tiles, lambda tile, carry: one(tile_of(at, spans, tile), carry), init)

        @mosaic.when(wg == CONSUMERS)
        def _():
            mosaic.set_max_registers(40, action="decrease")
            produce(at, over, memory, stages, (query, keys, values, pages, limits))

        @mosaic.when(wg < CONSUMERS)
        def _():
            mosaic.set_max_registers(232, action="increase")
            consume(at, over, memory, stages, wg, (pages, scale, bounded, stats, sums))

    launch = {
        "threads": CONSUMERS + 1,
        "tiles": at.chunks * rows * kv_heads * at.parts,
        "name": "decode_attention",
    }
    kernel = mosaic.launch(body, out, scratch={"memory": tuple(memory)}, **launch)
    return kernel(query, keys, values, pages, spans, jnp.max(spans[0])[None], scale, *limits)
