"""Decode attention on Hopper: a block takes a chunk of a sequence's keys for all queries that read
it, and the chunks are joined (Flash-Decoding, Dao et al., 2023).

Chunks are `CHUNK` keys from the sequence's first key on, whatever the batch is; a block's two
consumers take its steps of 64 keys in turns and join what they have. Each chunk leaves its sum of
weights and weighted values in float32, for weights 2^(score - reference) whose reference is the
largest score, rounded: an integer, so that going over to another reference rounds nothing. They are
joined in the order of the chunks. A sequence's output depends on its own keys and their number, and
on no neighbour, slot or page number.

All queries of a KV head, those of every sequence that shares the keys included, are rows of one
wgmma: 64 rows, of which a decode step often fills 4 or 8. It is bound by the loads of keys and
values. The product with few columns (S^T = K Q^T) would waste less, but its maximum over rows
crosses warps, for which Mosaic has one scratch for all warpgroups of a block.

A prefill is many queries of a row, each with limits of its own. A step that a query does not attend
to has the reference that it came with and weights of zero: it multiplies by 2^0 and adds zeros, and
changes no bit.

Keys meet queries in their own format, e4m3 or 16 bits: a head's 128 products at most are one sum in
the tensor core. Weights are float16 for e4m3 values, which become float16 on the way (exactly),
else the values' own 16 bits; the sums are float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.decode_attention.reference import first_visible, known_lengths, page_of

HEAD_DIMS = (64, 96, 128)
CHUNK, STEP = 512, 64  # keys of a chunk, and of one product; a page holds a multiple of STEP
CONSUMERS, ROWS = 2, 64  # warpgroups that multiply, and the queries that they multiply at a time
NO_KEY = -1e30  # the reference where there was no key: finite, so that differences are numbers
_E4M3, _SIXTEEN_BITS = "float8_e4m3fn", ("bfloat16", "float16")


def lacks(query, caches) -> str:
    """What the kernel would need to serve a call; empty where it does."""
    if query.shape[2] not in HEAD_DIMS:
        return f"attention with head_dim {query.shape[2]}, but with {HEAD_DIMS}"
    for cache in caches:
        page, per_row = page_of(cache)
        kinds = [x.dtype.name for x in (query, cache.keys, cache.values)]
        if kinds[0] != kinds[1] or not set(kinds) <= {_E4M3, *_SIXTEEN_BITS}:
            return (
                f"attention of {', '.join(kinds)} query, keys and values, but of e4m3 and 16 "
                "bits, query and keys alike"
            )
        if page % STEP and cache.pages is not None and cache.pages.shape[1] > 1:
            return f"attention over pages of {page} slots, but of multiples of {STEP}"
        if page % 8 and per_row > 1:
            return (
                f"attention over pages of {page} slots, several a cache row, but of multiples of 8"
            )
    return ""


def decode_attention(query, caches, score_scale, value_scale, window, out_dtype):
    starts = first_visible([known_lengths(cache) for cache in caches], len(query), window)
    limits = [(start, None) for start in starts]
    return attend(query, caches, limits, score_scale, value_scale, out_dtype)


def attend(query, caches, limits, score_scale, value_scale, out_dtype):
    """Attention of queries [sequences, heads, head_dim], each to an interval of the keys of its row
    in each cache.

    Args:
        limits: of each cache, int32 [rows, sequences of a row]: the first key that a query attends
            to, and the first beyond its last; None: no such limit but the row's keys.
        score_scale, value_scale: float32 [] or [kv_heads].
    """
    kv_heads, heads = caches[0].keys.shape[1], query.shape[1]
    scale = jnp.asarray(score_scale * math.log2(math.e), jnp.float32)
    scale = jnp.broadcast_to(scale, kv_heads)
    if jnp.ndim(value_scale):
        value_scale = jnp.repeat(value_scale, heads // kv_heads)
    joined = None
    for cache, limit in zip(caches, limits, strict=True):
        part = _attend_cache(query, cache, limit, scale)
        joined = part if joined is None else join(joined, part)
    assert joined is not None, "decode_attention has checked that there is a cache"
    _, total, out = joined
    out = out * (value_scale / jnp.where(total == 0, 1.0, total))[..., None]
    # the sign of a zero depends on the chunks that a query does not attend to
    return jnp.where(out == 0, 0.0, out).astype(out_dtype)


def _attend_cache(query, cache, limits, scale):
    """What all chunks of a cache leave, joined: float32 [sequences, heads], twice, and [sequences,
    heads, head_dim]."""
    (sequences, heads, dim), (rows,) = query.shape, cache.lengths.shape
    keys, values = (_pad_slots(x) for x in (cache.keys, cache.values))
    kv_heads, (page, per_row) = keys.shape[1], page_of(cache)
    group, shared, lengths = heads // kv_heads, sequences // rows, known_lengths(cache)
    if cache.pages is None:
        pages = jnp.arange(rows, dtype=jnp.int32)[:, None]
    else:
        pages = jnp.where((cache.pages >= 0) & (cache.pages < len(keys) * per_row), cache.pages, -1)
    queries = (
        query.reshape(rows, shared, kv_heads, group, dim)
        .swapaxes(1, 2)
        .reshape(rows, kv_heads, -1, dim)
    )
    count = shared * group
    extra = -count % (8 if count <= ROWS else ROWS)
    queries = jnp.pad(queries, [(0, 0), (0, 0), (0, extra), (0, 0)])
    limits = [None if limit is None else _each_query(limit, group, extra) for limit in limits]
    spans = spans_of(lengths, *limits, count + extra)
    stats, sums = chunks(
        queries, keys, values, pages, spans, *limits, scale, page=page, slots=cache.keys.shape[2]
    )
    joined = fold(stats, sums, chunks_in(spans, len(sums)))

    def by_sequence(x):
        x = x[:, :, :count].reshape(rows, kv_heads, shared, group, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(sequences, heads, *x.shape[4:])

    return tuple(by_sequence(x) for x in joined)


def _each_query(limit, group, extra):
    """A limit for every head of the group, and for the queries that fill up the last tile."""
    return jnp.pad(jnp.repeat(limit, group, axis=1), [(0, 0), (0, extra)], mode="edge").astype(
        jnp.int32
    )


def _pad_slots(x):
    """x with a multiple of 8 slots, as TMA wants them."""
    extra = -x.shape[2] % 8
    return jnp.pad(x, [(0, 0), (0, 0), (0, extra), (0, 0)]) if extra else x


def spans_of(lengths, first, last, queries: int):
    """Where the keys end that each part of a row's queries attends to, and the step with the first
    of them: int32 [2, rows, parts].

    Args:
        lengths: int32 [rows].
        first, last: int32 [rows, queries], the first key that each query attends to, and the first
            beyond its last; or None.
        queries: of a row.
    """
    shape = (len(lengths), -(-queries // ROWS), -1)
    end, begin = lengths[:, None], jnp.int32(0)
    if last is not None:
        end = jnp.minimum(end, last.reshape(shape).max(2))
    if first is not None:
        begin = lax.div(jnp.maximum(first.reshape(shape).min(2), 0), STEP)
    return jnp.stack([jnp.broadcast_to(x, shape[:2]) for x in (end, begin)])


def chunks_in(spans, chunks: int):
    """Which chunks have keys of each span, bool [chunks, rows, parts]."""
    first, (end, begin) = jnp.arange(chunks)[:, None, None] * (CHUNK // STEP), spans
    return jnp.maximum(first, begin) < jnp.minimum(first + CHUNK // STEP, -(-end // STEP))


def fold(stats, sums, present):
    """Join chunks one after the other: the order of a row's sum is that of its chunks, however
    many there could be.

    Args:
        stats, sums: as `chunks` returns them.
        present: as `chunks_in` returns it; the other chunks were not written.
    """

    def step(joined, part):
        stats, sums, present = part
        present = jnp.repeat(present, sums.shape[2] // present.shape[1], axis=1)[:, None]
        top = jnp.where(present, stats[:, :, 0], NO_KEY)
        total = jnp.where(present, stats[:, :, 1], 0.0)
        return join(joined, (top, total, jnp.where(present[..., None], sums, 0.0))), None

    nothing = (
        jnp.full_like(stats[0, :, :, 0], NO_KEY),
        jnp.zeros_like(stats[0, :, :, 1]),
        jnp.zeros_like(sums[0]),
    )
    return lax.scan(step, nothing, (stats, sums, present), unroll=min(len(sums), 16))[0]


def join(one, other):
    """(reference, sum of weights, weighted values) of two sets of keys as those of both.

    References are integers, so a factor is a power of two, and it does not matter which product XLA
    adds without rounding it.
    """
    top = jnp.maximum(one[0], other[0])
    scales = [_power_of_two(part[0] - top) for part in (one, other)]
    total = one[1] * scales[0] + other[1] * scales[1]
    return top, total, one[2] * scales[0][..., None] + other[2] * scales[1][..., None]


def _power_of_two(exponent):
    """2^exponent for integers up to 0, exactly; 0 below float32's normal range."""
    bits = (jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


@mosaic.outlined("page", "slots")
def chunks(query, keys, values, pages, spans, first, last, scale, *, page, slots):
    """What each chunk leaves: undefined where a part of a row's queries has no key in it.

    Args:
        query: [rows, kv_heads, queries, head_dim], all queries that read a row's keys: a multiple
            of 8, above 64 of 64.
        keys, values: [cache rows, kv_heads, slots, head_dim].
        pages: int32 [rows, pages], -1 where there is none.
        spans: of the rows, as `spans_of` has them, within the pages.
        first, last: int32 [rows, queries], the first key that each query attends to, and the first
            beyond its last; or None.
        scale: float32 [kv_heads], of scores, times log2(e).
        page, slots: slots of a page, and of a cache row without its padding.

    Returns:
        References and sums of weights, float32 [chunks, rows, kv_heads, 2, queries]; weighted
        values, [..., queries, dim].
    """
    rows, kv_heads, queries, head_dim = query.shape
    sizes = Sizes(rows, kv_heads, queries, head_dim, page, pages.shape[1], slots)
    limits = tuple(limit for limit in (first, last) if limit is not None)
    lead = (sizes.chunks, rows, kv_heads)
    out = (
        jax.ShapeDtypeStruct((*lead, 2, queries), jnp.float32),
        jax.ShapeDtypeStruct((*lead, queries, head_dim), jnp.float32),
    )
    memory, stages = memory_of(head_dim, query.dtype, keys.dtype, values.dtype, len(limits))

    def body(query, keys, values, pages, spans, longest, scale, *rest, memory):
        *limits, stats, sums = rest
        wg = lax.axis_index("wg")
        tiles = lax.div(longest[0] + CHUNK - 1, CHUNK) * (rows * kv_heads * sizes.parts)
        block = Block(sizes, Memory(*memory), stages, tiles, pages, spans)

        @mosaic.when(wg == CONSUMERS)
        def _():
            mosaic.set_max_registers(40, action="decrease")
            block.produce(query, keys, values, limits)

        @mosaic.when(wg < CONSUMERS)
        def _():
            mosaic.set_max_registers(232, action="increase")
            block.consume(wg, scale, (first is not None, last is not None), stats, sums)

    kernel = mosaic.launch(
        body,
        out,
        scratch={"memory": tuple(memory)},
        threads=CONSUMERS + 1,
        tiles=sizes.chunks * rows * kv_heads * sizes.parts,
        name="decode_attention",
    )
    return kernel(query, keys, values, pages, spans, jnp.max(spans[0])[None], scale, *limits)


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
        """How many tiles of 64 the queries of a row make."""
        return -(-self.queries // ROWS)


class Tile(NamedTuple):
    """A chunk of a row's keys for a KV head and a part of its queries, and the steps of the row
    that it takes."""

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


class Memory(NamedTuple):
    """Shared memory and barriers: a ring of keys and values a consumer, two slots of queries with
    their limits, and what consumers write. `full` and `empty` say whose turn a slot is."""

    keys: Any
    values: Any
    queries: Any
    limits: Any
    weights: Any
    float16_values: Any
    sums: Any
    stats: Any
    full: Any
    empty: Any
    queries_full: Any
    queries_empty: Any
    sums_empty: Any
    sums_full: Any


def memory_of(dim: int, query, key, value, limits: int) -> tuple[Memory, int]:
    """Shared memory of a launch, and the slots of each consumer's ring: what the rest leaves, 6 at
    most.

    Args:
        dim: head_dim.
        query, key, value: dtypes.
        limits: how many each query has.
    """
    weight = jnp.float16 if jnp.dtype(value).itemsize == 1 else value
    shapes = {
        "queries": ((2, ROWS, dim), query),
        "weights": ((CONSUMERS, STEP, STEP), weight, dim),
        "float16_values": ((CONSUMERS, STEP, dim), weight) if weight != value else None,
        "sums": ((ROWS, dim), jnp.float32),
    }
    fixed = sum(_bytes(*shape) for shape in shapes.values() if shape)
    stages = min(
        6,
        (mosaic.SMEM_BYTES - 6144 - fixed)
        // (CONSUMERS * (_bytes((STEP, dim), key) + _bytes((STEP, dim), value))),
    )
    slots = CONSUMERS * stages
    tiles = {name: mosaic.tiled(*shape) if shape else None for name, shape in shapes.items()}
    return (
        Memory(
            keys=mosaic.tiled((slots, STEP, dim), key),
            values=mosaic.tiled((slots, STEP, dim), value),
            limits=tuple(mosaic.SMEM((2, ROWS), jnp.int32) for _ in range(limits)),
            stats=mosaic.SMEM((2, ROWS), jnp.float32),
            full=mosaic.Barrier(num_arrivals=2, num_barriers=slots),
            empty=mosaic.Barrier(num_barriers=slots),
            queries_full=mosaic.Barrier(num_arrivals=1 + limits, num_barriers=2),
            queries_empty=mosaic.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            sums_empty=mosaic.Barrier(),
            sums_full=mosaic.Barrier(),
            **tiles,
        ),
        stages,
    )


def _bytes(shape, dtype, _like=0):
    return math.prod(shape) * jnp.dtype(dtype).itemsize


class Block(NamedTuple):
    """What the warpgroups of a block have in common.

    Attributes:
        stages: slots of each consumer's ring.
        tiles: how many there are, which may be fewer than were launched for.
        pages, spans: in global memory, as `chunks` takes them.
    """

    sizes: Sizes
    memory: Memory
    stages: int
    tiles: Any
    pages: Any
    spans: Any

    def over_tiles(self, one, init):
        """Fold `one` over this block's share of the tiles."""
        block, blocks = lax.axis_index("block"), lax.axis_size("block")
        own = lax.div(jnp.maximum(self.tiles - block + blocks - 1, 0), blocks)
        return lax.fori_loop(
            0, own, lambda i, carry: one(self.tile(block + i * blocks), carry), init
        )

    def tile(self, number) -> Tile:
        sizes, spans = self.sizes, self.spans
        part, rest = lax.rem(number, sizes.parts), lax.div(number, sizes.parts)
        head, rest = lax.rem(rest, sizes.kv_heads), lax.div(rest, sizes.kv_heads)
        row, chunk = lax.rem(rest, sizes.rows), lax.div(rest, sizes.rows)
        end, per_chunk = spans[0, row, part], CHUNK // STEP
        begin = jnp.maximum(chunk * per_chunk, spans[1, row, part])
        until = jnp.minimum((chunk + 1) * per_chunk, lax.div(end + STEP - 1, STEP))
        return Tile(chunk, row, head, part, begin, jnp.maximum(until - begin, 0), end)

    def place(self, row, step):
        """A step's page, or -1, and where it stands: (row, slot) of the cache, inside it whatever
        the page is."""
        sizes, key = self.sizes, step * STEP
        page = self.pages[row, lax.div(key, sizes.page)]
        known, per_row = jnp.maximum(page, 0), -(-sizes.slots // sizes.page)
        within = key if sizes.pages == 1 else lax.rem(key, sizes.page)
        if per_row == 1:
            return page, known, mosaic.multiple_of(within, STEP)
        return (
            page,
            lax.div(known, per_row),
            mosaic.multiple_of(lax.rem(known, per_row) * sizes.page + within, 8),
        )

    def produce(self, query, keys, values, limits):
        """Load, on a warpgroup of its own: a tile's queries, and keys and values into the ring of
        the step's consumer."""
        memory, stages = self.memory, self.stages
        width = min(self.sizes.queries, ROWS)

        def load_queries(tile: Tile, turn):
            slot, rows = lax.rem(turn, 2), mosaic.ds(tile.part * ROWS, width)
            mosaic.when(turn >= 2)(lambda: mosaic.barrier_wait(memory.queries_empty.at[slot]))
            here, full = mosaic.ds(0, width), memory.queries_full.at[slot]
            mosaic.copy_gmem_to_smem(
                query.at[tile.row, tile.head, rows], memory.queries.at[slot, here], full
            )
            for limit, to in zip(limits, memory.limits, strict=True):
                mosaic.copy_gmem_to_smem(limit.at[tile.row, rows], to.at[slot, here], full)

        def load(tile: Tile, counts):
            (first, second), turn = counts
            mosaic.when(tile.steps > 0)(lambda: load_queries(tile, turn))

            def load_step(i, _):
                step = tile.begin + i
                consumer = lax.rem(step, CONSUMERS)
                count = jnp.where(consumer == 0, first, second) + lax.div(
                    step - tile.own(consumer)[0], CONSUMERS
                )
                slot = consumer * stages + lax.rem(count, stages)
                _, row, at_slot = self.place(tile.row, step)
                mosaic.when(count >= stages)(lambda: mosaic.barrier_wait(memory.empty.at[slot]))
                for source, to in ((keys, memory.keys), (values, memory.values)):
                    here = source.at[row, tile.head, mosaic.ds(at_slot, STEP)]
                    mosaic.copy_gmem_to_smem(here, to.at[slot], memory.full.at[slot])

            lax.fori_loop(0, tile.steps, load_step, None)
            loaded = first + tile.own(0)[1], second + tile.own(1)[1]
            return loaded, turn + jnp.where(tile.steps > 0, 1, 0)

        zero = jnp.int32(0)
        loaded, turn = self.over_tiles(load, ((zero, zero), zero))
        # every slot that was used is still to be handed back
        for slot in range(2):
            mosaic.when(slot < turn)(
                lambda slot=slot: mosaic.barrier_wait(memory.queries_empty.at[slot])
            )
        for i, count in enumerate(loaded):
            for slot in range(stages):
                mosaic.when(slot < count)(
                    lambda slot=i * stages + slot: mosaic.barrier_wait(memory.empty.at[slot])
                )

    def consume(self, wg, scale, bounded, stats, sums):
        """Multiply, on each of two warpgroups: its steps of a tile, which are then joined and
        written."""
        memory, stages = self.memory, self.stages
        bounded_below, bounded_above = bounded
        by_row, shape = mosaic.Layout.WGMMA.reduce(1), (ROWS, STEP)

        def attend(tile: Tile, count, turn):
            slot_of_queries, (start, steps) = lax.rem(turn, 2), tile.own(wg)
            score_scale = scale[tile.head]
            mosaic.barrier_wait(memory.queries_full.at[slot_of_queries])
            limits = [
                mosaic.load(limit.at[slot_of_queries], layout=by_row, optimized=False)
                for limit in memory.limits
            ]
            limits = [lax.broadcast_in_dim(limit, shape, [0]) for limit in limits]

            def attend_step(i, carry):
                top, total, out = carry
                step, slot = start + i * CONSUMERS, wg * stages + lax.rem(count + i, stages)
                page, _, at_slot = self.place(tile.row, step)
                keys = jnp.where(
                    page < 0, 0, jnp.minimum(tile.end - step * STEP, self.sizes.slots - at_slot)
                )
                mosaic.barrier_wait(memory.full.at[slot])
                values = memory.values.at[slot]
                if memory.float16_values is not None:
                    e4m3 = mosaic.load(
                        values, layout=mosaic.Layout.WGMMA_UPCAST_4X, optimized=False
                    )
                    values = memory.float16_values.at[wg]
                    values[...] = e4m3.astype(jnp.float32).astype(values.dtype)
                scores = (
                    _product(
                        memory.queries.at[slot_of_queries],
                        memory.keys.at[slot].transpose((1, 0)),
                        shape,
                    )
                    * score_scale
                )
                key = mosaic.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.Layout.WGMMA)
                visible = key < keys
                if bounded_below:
                    visible = visible & (key + step * STEP >= limits[0])
                if bounded_above:
                    visible = visible & (key + step * STEP < limits[-1])
                scores = jnp.where(visible, scores, -jnp.inf)
                higher = jnp.maximum(
                    top, lax.round(scores.max(axis=1), lax.RoundingMethod.TO_NEAREST_EVEN)
                )
                weights = jnp.exp2(scores - lax.broadcast_in_dim(higher, shape, [0]))
                rescale = jnp.exp2(top - higher)
                weights = weights.astype(memory.weights.dtype)
                memory.weights[wg] = weights
                # the weights that are summed are those that multiply values, rounded: the error of
                # a large one cancels
                total = total * rescale + weights.astype(jnp.float32).sum(axis=1)
                mosaic.commit_smem()
                if memory.float16_values is not None:
                    mosaic.barrier_arrive(memory.empty.at[slot])
                out = out * lax.broadcast_in_dim(rescale, out.shape, [0]) + _product(
                    memory.weights.at[wg], values, out.shape
                )
                if memory.float16_values is None:
                    mosaic.barrier_arrive(memory.empty.at[slot])
                return higher, total, out

            def filled(value, shape, layout):
                return mosaic.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            nothing = (
                filled(NO_KEY, ROWS, by_row),
                filled(0.0, ROWS, by_row),
                filled(0.0, (ROWS, self.sizes.head_dim), mosaic.Layout.WGMMA),
            )
            part = lax.fori_loop(0, steps, attend_step, nothing)
            if limits:
                mosaic.commit_smem()  # the next load of the slot is another proxy's write
            mosaic.barrier_arrive(memory.queries_empty.at[slot_of_queries])
            self.join_consumers(tile, wg, part, stats, sums)

        def tile(tile: Tile, counts):
            count, turn = counts
            mosaic.when(tile.steps > 0)(lambda: attend(tile, count, turn))
            return count + tile.own(wg)[1], turn + jnp.where(tile.steps > 0, 1, 0)

        self.over_tiles(tile, (jnp.int32(0), jnp.int32(0)))
        mosaic.wait_smem_to_gmem(0)

    def join_consumers(self, tile: Tile, wg, part, stats, sums):
        """The second consumer hands over what it has, the first joins it to its own and writes
        both."""
        memory, (top, total, out) = self.memory, part

        @mosaic.when(wg == 1)
        def _():
            mosaic.barrier_wait(memory.sums_empty)
            memory.stats[0], memory.stats[1], memory.sums[...] = top, total, out
            mosaic.commit_smem()
            mosaic.barrier_arrive(memory.sums_full)

        @mosaic.when(wg == 0)
        def _():
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            mosaic.barrier_arrive(memory.sums_empty)
            mosaic.barrier_wait(memory.sums_full)
            by_row, width = mosaic.Layout.WGMMA.reduce(1), min(self.sizes.queries, ROWS)
            other_top, other_total = (
                mosaic.load(memory.stats.at[i], layout=by_row, optimized=False) for i in range(2)
            )
            higher = jnp.maximum(top, other_top)
            scales = jnp.exp2(top - higher), jnp.exp2(other_top - higher)
            columns = [lax.broadcast_in_dim(x, out.shape, [0]) for x in scales]
            memory.sums[...] = out * columns[0] + memory.sums[...] * columns[1]
            memory.stats[0], memory.stats[1] = higher, total * scales[0] + other_total * scales[1]
            mosaic.commit_smem()
            here, rows = mosaic.ds(0, width), mosaic.ds(tile.part * ROWS, width)
            place = (tile.chunk, tile.row, tile.head)
            mosaic.copy_smem_to_gmem(memory.sums.at[here], sums.at[*place, rows])
            for i in range(2):
                mosaic.copy_smem_to_gmem(memory.stats.at[i, here], stats.at[*place, i, rows])


def _product(left, right, shape):
    def multiply(acc):
        mosaic.wgmma(acc, left, right)
        return acc[...]

    return mosaic.run_scoped(multiply, mosaic.ACC(shape, jnp.float32))
