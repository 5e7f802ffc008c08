"""Attention of one query token a sequence on Hopper: a block takes a chunk of a sequence's keys for all queries that read it.

Chunks are `CHUNK` keys from the sequence's first key on, whatever the batch is; a block's two consumers take its steps of 64 keys
in turns and join what they have. Each chunk leaves its sum of weights and weighted values in float32, for weights
2^(score - reference) whose reference is the largest score, rounded: an integer, so that going over to another reference rounds
nothing. They are joined in the order of the chunks. A sequence's output depends on its own keys and their number, and on no
neighbour, slot or page number.

All queries of a key head, those of every sequence that shares the keys included, are rows of one wgmma: 64 rows, of which a
decode step often fills 4 or 8. It is bound by the loads of keys and values. The product with few columns (S^T = K Q^T) would
waste less, but its maximum over rows crosses warps, for which Mosaic has one scratch for all warpgroups of a block.

Keys meet queries in their own format, e4m3 or 16 bits: a head's 128 products at most are one sum in the tensor core. Weights are
float16 for e4m3 values, which become float16 on the way (exactly), else the values' own 16 bits; the sums are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic

STEP = 64  # keys that a consumer takes at a time: a page holds a multiple of it
CHUNK = 512
CONSUMERS, ROWS = 2, 64
NOTHING = -1e30  # the reference where no key was seen: finite, so that differences are numbers


class Sizes(NamedTuple):
    """Sizes of a launch: `rows` of the page table, `queries` that read each, `pages` of `page` slots each."""

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


class Memory(NamedTuple):
    """Shared memory and barriers: a ring of keys and values a consumer, two slots of queries, and what consumers write."""

    keys: Any
    values: Any
    queries: Any
    first: Any
    weights: Any
    wide: Any
    sums: Any
    stats: Any
    full: Any
    empty: Any
    asked: Any
    answered: Any
    free: Any
    handed: Any


class Tile(NamedTuple):
    """A chunk of a row's keys for a head and a part of its queries, and the steps of the row that it takes."""

    chunk: Any
    row: Any
    head: Any
    part: Any
    begin: Any
    steps: Any
    length: Any

    def own(self, consumer) -> tuple[Any, Any]:
        """The first step of a consumer, and how many it has. A step is the same consumer's wherever the tile begins."""
        skip = lax.rem(self.begin + consumer, CONSUMERS)
        return self.begin + skip, lax.div(jnp.maximum(self.steps - skip + 1, 0), CONSUMERS)


@mosaic.outlined("page", "slots")
def partials(query, keys, values, pages, lengths, first, scale, *, page, slots):
    """What each chunk leaves: undefined where a row has no key in it, or none from its first step on.

    Args:
        query: [rows, kv_heads, queries, head_dim], all queries that read a row's keys: a multiple of 8, above 64 of 64.
        keys, values: [cache rows, kv_heads, slots, head_dim].
        pages: int32 [rows, pages], -1 where there is none.
        lengths: int32 [rows], within the pages.
        first: int32 [rows, queries], the first key that each query sees, or None.
        scale: float32 [1], of scores, times log2(e).
        page, slots: slots of a page, and of a cache row without its padding.

    Returns:
        References and sums of weights, float32 [chunks, rows, kv_heads, 2, queries]; weighted values, [..., queries, dim].
    """
    rows, kv_heads, queries, head_dim = query.shape
    at = Sizes(rows, kv_heads, queries, head_dim, page, pages.shape[1], slots)
    windowed, lead = first is not None, (at.chunks, rows, kv_heads)
    out = (
        jax.ShapeDtypeStruct((*lead, 2, queries), jnp.float32),
        jax.ShapeDtypeStruct((*lead, queries, head_dim), jnp.float32),
    )
    begin = first_step(first) if windowed else jnp.zeros(rows, jnp.int32)
    first = first if windowed else jnp.zeros((rows, queries), jnp.int32)
    memory, stages = memory_of(at, query.dtype, keys.dtype, values.dtype, windowed)

    def body(query, keys, values, pages, spans, longest, scale, first, stats, sums, memory):
        memory, wg = Memory(*memory), lax.axis_index("wg")
        tiles = lax.div(longest[0] + CHUNK - 1, CHUNK) * (rows * kv_heads * at.parts)

        def over(one, init):
            return _over_tiles(tiles, lambda tile, carry: one(_tile(at, spans, tile), carry), init)

        @mosaic.when(wg == CONSUMERS)
        def _():
            mosaic.set_max_registers(40, action="decrease")
            _produce(at, over, memory, stages, (query, keys, values, pages, first if windowed else None))

        @mosaic.when(wg < CONSUMERS)
        def _():
            mosaic.set_max_registers(232, action="increase")
            _consume(at, over, memory, stages, wg, (pages, scale, windowed, stats, sums))

    launch = {"threads": CONSUMERS + 1, "tiles": at.chunks * rows * kv_heads * at.parts, "name": "decode_attention"}
    kernel = mosaic.launch(body, out, scratch={"memory": tuple(memory)}, **launch)
    return kernel(query, keys, values, pages, jnp.stack([lengths, begin]), jnp.max(lengths)[None], scale, first)


def first_step(first):
    """Of each row: the step with the first key that any of its queries sees."""
    return lax.div(jnp.maximum(first.min(1), 0), STEP)


def memory_of(at: Sizes, query, key, value, windowed: bool) -> tuple[Memory, int]:
    """Shared memory of a launch, and the slots of each consumer's ring: what the rest leaves, 6 at most."""
    dim, weight = at.head_dim, jnp.float16 if jnp.dtype(value).itemsize == 1 else value
    wide = weight != value
    shapes = {
        "queries": ((2, ROWS, dim), query),
        "weights": ((CONSUMERS, STEP, STEP), weight, dim),
        "wide": ((CONSUMERS, STEP, dim), weight) if wide else None,
        "sums": ((ROWS, dim), jnp.float32),
    }
    fixed = sum(_bytes(*shape) for shape in shapes.values() if shape)
    stages = min(6, (mosaic.SMEM_BYTES - 6144 - fixed) // (CONSUMERS * (_bytes((STEP, dim), key) + _bytes((STEP, dim), value))))
    slots = CONSUMERS * stages
    tiles = {name: mosaic.tiled(*shape) if shape else None for name, shape in shapes.items()}
    return (
        Memory(
            keys=mosaic.tiled((slots, STEP, dim), key),
            values=mosaic.tiled((slots, STEP, dim), value),
            first=mosaic.SMEM((2, ROWS), jnp.int32) if windowed else None,
            stats=mosaic.SMEM((2, ROWS), jnp.float32),
            full=mosaic.Barrier(num_arrivals=2, num_barriers=slots),
            empty=mosaic.Barrier(num_barriers=slots),
            asked=mosaic.Barrier(num_arrivals=1 + windowed, num_barriers=2),
            answered=mosaic.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            free=mosaic.Barrier(),
            handed=mosaic.Barrier(),
            **tiles,
        ),
        stages,
    )


def _bytes(shape, dtype, _like=0):
    size = jnp.dtype(dtype).itemsize
    for side in shape:
        size *= side
    return size


def _over_tiles(tiles, one, init):
    """Folds `one` over this block's share of the tiles, which may be fewer than were launched for."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    own = lax.div(jnp.maximum(tiles - block + blocks - 1, 0), blocks)
    return lax.fori_loop(0, own, lambda i, carry: one(block + i * blocks, carry), init)


def _tile(at: Sizes, spans, tile) -> Tile:
    part, rest = lax.rem(tile, at.parts), lax.div(tile, at.parts)
    head, rest = lax.rem(rest, at.kv_heads), lax.div(rest, at.kv_heads)
    row, chunk = lax.rem(rest, at.rows), lax.div(rest, at.rows)
    length, per_chunk = spans[0, row], CHUNK // STEP
    begin = jnp.maximum(chunk * per_chunk, spans[1, row])
    end = jnp.minimum((chunk + 1) * per_chunk, lax.div(length + STEP - 1, STEP))
    return Tile(chunk, row, head, part, begin, jnp.maximum(end - begin, 0), length)


def _slot(at: Sizes, pages, row, step):
    """A step's page, or -1, and where it stands: (row, slot) of the cache, inside it whatever the page is."""
    key = step * STEP
    page = pages[row, lax.div(key, at.page)]
    known, per_row = jnp.maximum(page, 0), -(-at.slots // at.page)
    within = key if at.pages == 1 else lax.rem(key, at.page)
    if per_row == 1:
        return page, known, mosaic.multiple_of(within, STEP)
    return page, lax.div(known, per_row), mosaic.multiple_of(lax.rem(known, per_row) * at.page + within, 8)


def _produce(at: Sizes, over, memory: Memory, stages, inputs):
    query, keys, values, pages, first = inputs
    width = min(at.queries, ROWS)

    def load_queries(tile: Tile, turn):
        slot, rows = lax.rem(turn, 2), mosaic.ds(tile.part * ROWS, width)
        mosaic.when(turn >= 2)(lambda: mosaic.barrier_wait(memory.answered.at[slot]))
        here = mosaic.ds(0, width)
        mosaic.copy_gmem_to_smem(query.at[tile.row, tile.head, rows], memory.queries.at[slot, here], memory.asked.at[slot])
        if first is not None:
            mosaic.copy_gmem_to_smem(first.at[tile.row, rows], memory.first.at[slot, here], memory.asked.at[slot])

    def load(tile: Tile, counts):
        *taken, turn = counts
        mosaic.when(tile.steps > 0)(lambda: load_queries(tile, turn))

        def one(i, _):
            step = tile.begin + i
            consumer = lax.rem(step, CONSUMERS)
            count = jnp.where(consumer == 0, *taken) + lax.div(step - tile.own(consumer)[0], CONSUMERS)
            slot = consumer * stages + lax.rem(count, stages)
            _, row, at_slot = _slot(at, pages, tile.row, step)
            mosaic.when(count >= stages)(lambda: mosaic.barrier_wait(memory.empty.at[slot]))
            for source, to in ((keys, memory.keys), (values, memory.values)):
                here = source.at[row, tile.head, mosaic.ds(at_slot, STEP)]
                mosaic.copy_gmem_to_smem(here, to.at[slot], memory.full.at[slot])

        lax.fori_loop(0, tile.steps, one, None)
        return *(count + tile.own(i)[1] for i, count in enumerate(taken)), turn + jnp.where(tile.steps > 0, 1, 0)

    zero = jnp.int32(0)
    *taken, turn = over(load, (zero, zero, zero))
    # every slot that was used is still to be handed back
    for slot in range(2):
        mosaic.when(slot < turn)(lambda slot=slot: mosaic.barrier_wait(memory.answered.at[slot]))
    for i, count in enumerate(taken):
        for slot in range(stages):
            mosaic.when(slot < count)(lambda slot=i * stages + slot: mosaic.barrier_wait(memory.empty.at[slot]))


def _consume(at: Sizes, over, memory: Memory, stages, wg, inputs):
    pages, scale, windowed, stats, sums = inputs
    scale, by_row = scale[0], mosaic.Layout.WGMMA.reduce(1)
    shape = (ROWS, STEP)

    def attend(tile: Tile, count, turn):
        asked, (start, steps) = lax.rem(turn, 2), tile.own(wg)
        mosaic.barrier_wait(memory.asked.at[asked])
        first = None
        if windowed:
            first = mosaic.load(memory.first.at[asked], layout=by_row, optimized=False)
            first = lax.broadcast_in_dim(first, shape, [0])

        def one(i, carry):
            top, total, out = carry
            step, slot = start + i * CONSUMERS, wg * stages + lax.rem(count + i, stages)
            page, _, at_slot = _slot(at, pages, tile.row, step)
            seen = jnp.where(page < 0, 0, jnp.minimum(tile.length - step * STEP, at.slots - at_slot))
            mosaic.barrier_wait(memory.full.at[slot])
            values = memory.values.at[slot]
            if memory.wide is not None:
                narrow = mosaic.load(values, layout=mosaic.Layout.WGMMA_UPCAST_4X, optimized=False)
                values = memory.wide.at[wg]
                values[...] = narrow.astype(jnp.float32).astype(values.dtype)
            scores = _product(memory.queries.at[asked], memory.keys.at[slot].transpose((1, 0)), shape) * scale
            key = mosaic.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.Layout.WGMMA)
            visible = key < seen
            if windowed:
                visible = visible & (key + step * STEP >= first)
            scores = jnp.where(visible, scores, -jnp.inf)
            higher = jnp.maximum(top, lax.round(scores.max(axis=1), lax.RoundingMethod.TO_NEAREST_EVEN))
            weights, rescale = jnp.exp2(scores - lax.broadcast_in_dim(higher, shape, [0])), jnp.exp2(top - higher)
            weights = weights.astype(memory.weights.dtype)
            memory.weights[wg] = weights
            total = total * rescale + weights.astype(jnp.float32).sum(axis=1)  # of what multiplies: one large weight cancels
            mosaic.commit_smem()
            if memory.wide is not None:
                mosaic.barrier_arrive(memory.empty.at[slot])
            out = out * lax.broadcast_in_dim(rescale, out.shape, [0]) + _product(memory.weights.at[wg], values, out.shape)
            if memory.wide is None:
                mosaic.barrier_arrive(memory.empty.at[slot])
            return higher, total, out

        def filled(value, shape, layout):
            return mosaic.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        nothing = (filled(NOTHING, ROWS, by_row), filled(0.0, ROWS, by_row))
        nothing = (*nothing, filled(0.0, (ROWS, at.head_dim), mosaic.Layout.WGMMA))
        found = lax.fori_loop(0, steps, one, nothing)
        if windowed:
            mosaic.commit_smem()  # the next load of the slot is another proxy's write
        mosaic.barrier_arrive(memory.answered.at[asked])
        _join(at, memory, tile, wg, found, stats, sums)

    def tile(tile: Tile, counts):
        count, turn = counts
        mosaic.when(tile.steps > 0)(lambda: attend(tile, count, turn))
        return count + tile.own(wg)[1], turn + jnp.where(tile.steps > 0, 1, 0)

    over(tile, (jnp.int32(0), jnp.int32(0)))
    mosaic.wait_smem_to_gmem(0)


def _join(at: Sizes, memory: Memory, tile: Tile, wg, found, stats, sums):
    """The second consumer hands over what it has, the first joins it to its own and writes both."""
    top, total, out = found

    @mosaic.when(wg == 1)
    def _():
        mosaic.barrier_wait(memory.free)
        memory.stats[0], memory.stats[1], memory.sums[...] = top, total, out
        mosaic.commit_smem()
        mosaic.barrier_arrive(memory.handed)

    @mosaic.when(wg == 0)
    def _():
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        mosaic.barrier_arrive(memory.free)
        mosaic.barrier_wait(memory.handed)
        by_row, width = mosaic.Layout.WGMMA.reduce(1), min(at.queries, ROWS)
        other_top, other_total = (mosaic.load(memory.stats.at[i], layout=by_row, optimized=False) for i in range(2))
        both = jnp.maximum(top, other_top)
        mine, others = jnp.exp2(top - both), jnp.exp2(other_top - both)
        wide = [lax.broadcast_in_dim(x, out.shape, [0]) for x in (mine, others)]
        memory.sums[...] = out * wide[0] + memory.sums[...] * wide[1]
        memory.stats[0], memory.stats[1] = both, total * mine + other_total * others
        mosaic.commit_smem()
        here, rows = mosaic.ds(0, width), mosaic.ds(tile.part * ROWS, width)
        place = (tile.chunk, tile.row, tile.head)
        mosaic.copy_smem_to_gmem(memory.sums.at[here], sums.at[*place, rows])
        for i in range(2):
            mosaic.copy_smem_to_gmem(memory.stats.at[i, here], stats.at[*place, i, rows])


def _product(left, right, shape):
    def run(acc):
        mosaic.wgmma(acc, left, right)
        return acc[...]

    return mosaic.run_scoped(run, mosaic.ACC(shape, jnp.float32))
