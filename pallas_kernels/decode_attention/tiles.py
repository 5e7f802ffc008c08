"""How the keys of a launch are cut: rows into chunks, chunks into steps, and which block and
consumer takes which."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic

STEP = 64  # keys that a consumer takes at a time: a page holds a multiple of it
CHUNK = 512
CONSUMERS, ROWS = 2, 64
NOTHING = -1e30  # the reference where no key was seen: finite, so that differences are numbers


class Sizes(NamedTuple):
    """Sizes of a launch: `rows` of the page table, `queries` that read each, `pages` of `page`
    slots each."""

    rows: int
    kv_heads: int
    queries: int
    head_dim: int
    page: int
    pages: int
    slots: int

    @property
    def chunks(self) -> int:
        return -(-self.page * self.pages // CHUNK)

    @property
    def parts(self) -> int:
        """Into how many tiles of 64 the queries of a row are cut."""
        return -(-self.queries // ROWS)


class Tile(NamedTuple):
    """A chunk of a row's keys for a head and a part of its queries, and the steps of the row that
    it takes."""

    chunk: Any
    row: Any
    head: Any
    part: Any
    begin: Any
    steps: Any
    end: Any

    def own(self, consumer) -> tuple[Any, Any]:
        """The first step of a consumer, and how many it has. A step is the same consumer's wherever
        the tile begins."""
        skip = lax.rem(self.begin + consumer, CONSUMERS)
        return self.begin + skip, lax.div(jnp.maximum(self.steps - skip + 1, 0), CONSUMERS)


def spans_of(lengths, first, last, queries: int):
    """Where the keys end that each part of a row's queries sees, and the step with the first of
    them: int32 [2, rows, parts].

    Args:
        lengths: int32 [rows].
        first, last: int32 [rows, queries], the first key that each query sees, and the first beyond
            its last; or None.
        queries: of a row.
    """
    shape = (len(lengths), -(-queries // ROWS), -1)
    end, begin = lengths[:, None], jnp.int32(0)
    if last is not None:
        end = jnp.minimum(end, last.reshape(shape).max(2))
    if first is not None:
        begin = lax.div(jnp.maximum(first.reshape(shape).min(2), 0), STEP)
    return jnp.stack([jnp.broadcast_to(x, shape[:2]) for x in (end, begin)])


def taken(chunks: int, spans):
    """Which chunks the parts of a row take, [chunks, rows, parts]."""
    first, (end, begin) = jnp.arange(chunks)[:, None, None] * (CHUNK // STEP), spans
    return jnp.maximum(first, begin) < jnp.minimum(first + CHUNK // STEP, -(-end // STEP))


def over_tiles(tiles, one, init):
    """Folds `one` over this block's share of the tiles, which may be fewer than were launched
    for."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    own = lax.div(jnp.maximum(tiles - block + blocks - 1, 0), blocks)
    return lax.fori_loop(0, own, lambda i, carry: one(block + i * blocks, carry), init)


def tile_of(at: Sizes, spans, tile) -> Tile:
    part, rest = lax.rem(tile, at.parts), lax.div(tile, at.parts)
    head, rest = lax.rem(rest, at.kv_heads), lax.div(rest, at.kv_heads)
    row, chunk = lax.rem(rest, at.rows), lax.div(rest, at.rows)
    end, per_chunk = spans[0, row, part], CHUNK // STEP
    begin = jnp.maximum(chunk * per_chunk, spans[1, row, part])
    until = jnp.minimum((chunk + 1) * per_chunk, lax.div(end + STEP - 1, STEP))
    return Tile(chunk, row, head, part, begin, jnp.maximum(until - begin, 0), end)


def slot_of(at: Sizes, pages, row, step):
    """A step's page, or -1, and where it stands: (row, slot) of the cache, inside it whatever the
    page is."""
    key = step * STEP
    page = pages[row, lax.div(key, at.page)]
    known, per_row = jnp.maximum(page, 0), -(-at.slots // at.page)
    within = key if at.pages == 1 else lax.rem(key, at.page)
    if per_row == 1:
        return page, known, mosaic.multiple_of(within, STEP)
    return (
        page,
        lax.div(known, per_row),
        mosaic.multiple_of(lax.rem(known, per_row) * at.page + within, 8),
    )
