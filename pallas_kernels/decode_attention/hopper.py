"""Decode attention on Hopper: a block takes a chunk of a sequence's keys for all queries that read
it, and the chunks are joined (Flash-Decoding, Dao et al., 2023).

Chunks are `CHUNK` keys from the sequence's first key on, whatever the batch is; a block takes their
steps of 64 keys one after the other. Each chunk leaves its sum of weights and weighted values in
float32, for weights 2^(score - reference) whose reference is the largest score, rounded: an
integer, so that going over to another reference rounds nothing. They are joined in the order of the
chunks. A sequence's output depends on its own keys and their number, and on no neighbour, slot or
page number.

All queries of a KV head, those of every sequence that shares the keys included, are multiplied at
once. A decode step often has 4 or 8 of them and wgmma 64 rows, so keys and numbers of a value are
its rows, and queries its columns: scores are K Q^T, the output V^T P^T. The largest score of a
query is then a maximum over warps, for which Mosaic has one scratch a block: one warpgroup
multiplies, and two blocks share a multiprocessor. Above `FEW` queries two warpgroups of a block
multiply, each for its part of them, and take turns with the scratch.

No sum of a query depends on how many columns there are: wgmma adds each column's products alike, a
thread adds the weights of its own keys step by step, and what threads and warps have is added in
one order.

A prefill is many queries of a row, each with limits of its own. A step that a query does not attend
to has the reference that it came with and weights of zero: it multiplies by 2^0 and adds zeros, and
changes no bit.

Keys meet queries in their own format, e4m3 or 16 bits: a head's 128 products at most are one sum in
the tensor core. Weights are float16 for e4m3 values, which become float16 on the way (exactly),
else the values' own 16 bits; the sums are float32. 2^x of scores is approximate, with an error far
below that rounding; the factors between references are put together from their bits.
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
FEW, QUERIES = 16, 64  # queries that one warpgroup multiplies, and that two do, at a time
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
    kv_heads = caches[0].keys.shape[1]
    scale = jnp.asarray(score_scale * math.log2(math.e), jnp.float32)
    scale = jnp.broadcast_to(scale, kv_heads)
    joined = None
    for cache, limit in zip(caches, limits, strict=True):
        part = _attend_cache(query, cache, limit, scale)
        joined = part if joined is None else join(joined, part)
    assert joined is not None, "decode_attention has checked that there is a cache"
    _, total, out = joined
    factor = jnp.reshape(value_scale, (-1, 1)) / jnp.where(total == 0, 1.0, total)
    out = out * factor[:, :, None]
    # the sign of a zero depends on the chunks that a query does not attend to
    out = jnp.where(out == 0, 0.0, out).astype(out_dtype)
    return out.swapaxes(2, 3).reshape(query.shape)


def _attend_cache(query, cache, limits, scale):
    """What all chunks of a cache leave, joined: float32 [sequences, kv_heads, group], twice, and
    [sequences, kv_heads, head_dim, group]."""
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
    extra = -count % (8 if count <= FEW else 16 if count <= QUERIES else QUERIES)
    queries = jnp.pad(queries, [(0, 0), (0, 0), (0, extra), (0, 0)])
    limits = [None if limit is None else _each_query(limit, group, extra) for limit in limits]
    spans = spans_of(lengths, *limits, count + extra)
    stats, sums = chunks(
        queries, keys, values, pages, spans, *limits, scale, page=page, slots=cache.keys.shape[2]
    )
    joined = fold(stats, sums, chunks_in(spans, len(sums)))

    def by_sequence(x):
        x = x[..., :count].reshape(*x.shape[:-1], shared, group)
        x = jnp.moveaxis(x, -2, 1)
        return x.reshape(sequences, *x.shape[2:])

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
    shape = (len(lengths), -(-queries // QUERIES), -1)
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
        present = jnp.repeat(present, sums.shape[3] // present.shape[1], axis=1)[:, None]
        top = jnp.where(present, stats[:, :, 0], NO_KEY)
        total = jnp.where(present, stats[:, :, 1], 0.0)
        sums = jnp.where(present[:, :, None], sums, 0.0)
        return join(joined, (top, total, sums)), None

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
    of_values = [scale[..., None, :] for scale in scales]
    return top, total, one[2] * of_values[0] + other[2] * of_values[1]


def _power_of_two(exponent):
    """2^exponent for integers up to 0, exactly; 0 below float32's normal range."""
    bits = (jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


@mosaic.outlined("page", "slots")
def chunks(query, keys, values, pages, spans, first, last, scale, *, page, slots):
    """What each chunk leaves: undefined where a part of a row's queries has no key in it.

    Args:
        query: [rows, kv_heads, queries, head_dim], all queries that read a row's keys: a multiple
            of 8, above `FEW` of 16, above `QUERIES` of `QUERIES`.
        keys, values: [cache rows, kv_heads, slots, head_dim].
        pages: int32 [rows, pages], -1 where there is none.
        spans: of the rows, as `spans_of` has them, within the pages.
        first, last: int32 [rows, queries], the first key that each query attends to, and the first
            beyond its last; or None.
        scale: float32 [kv_heads], of scores, times log2(e).
        page, slots: slots of a page, and of a cache row without its padding.

    Returns:
        References and sums of weights, float32 [chunks, rows, kv_heads, 2, queries]; weighted
        values, [..., head_dim, queries].
    """
    rows, kv_heads, queries, head_dim = query.shape
    sizes = Sizes(rows, kv_heads, queries, head_dim, page, pages.shape[1], slots)
    limits = tuple(limit for limit in (first, last) if limit is not None)
    lead = (sizes.chunks, rows, kv_heads)
    out = (
        jax.ShapeDtypeStruct((*lead, 2, queries), jnp.float32),
        jax.ShapeDtypeStruct((*lead, head_dim, queries), jnp.float32),
    )
    # as many as have the registers: up to 128 for each of 256 threads, 168 for each of 384
    blocks = 2 if sizes.consumers == 1 else 1
    memory, stages = memory_of(sizes, query.dtype, keys.dtype, values.dtype, blocks)

    def body(query, keys, values, pages, spans, longest, scale, *rest, memory):
        *limits, stats, sums = rest
        wg = lax.axis_index("wg")
        tiles = lax.div(longest[0] + CHUNK - 1, CHUNK) * (rows * kv_heads * sizes.parts)
        block = Block(sizes, Memory(*memory), stages, tiles, pages, spans)

        @mosaic.when(wg == sizes.consumers)
        def _():
            block.produce(query, keys, values)

        @mosaic.when(wg < sizes.consumers)
        def _():
            consumer = 0 if sizes.consumers == 1 else wg
            block.consume(
                consumer, scale, limits, (first is not None, last is not None), stats, sums
            )

    kernel = mosaic.launch(
        body,
        out,
        scratch={"memory": tuple(memory)},
        threads=sizes.consumers + 1,
        tiles=sizes.chunks * rows * kv_heads * sizes.parts,
        name="decode_attention",
        blocks=blocks,
        # warps pass shared memory to each other in `consume` alone, which has barriers of its own
        unsafe_no_auto_barriers=True,
        approx_math=True,
        reduction_scratch_bytes=_scratch(sizes.width),
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
    def consumers(self) -> int:
        """Warpgroups that multiply, each for its part of a tile's queries."""
        return 1 if self.queries <= FEW else 2

    @property
    def width(self) -> int:
        """Queries of a consumer."""
        return min(self.queries, QUERIES) // self.consumers

    @property
    def parts(self) -> int:
        """How many tiles the queries of a row make."""
        return -(-self.queries // QUERIES)

    @property
    def columns(self) -> tuple[int, ...]:
        """Where the parts of a value begin that a product takes, of 64 numbers. Two of head_dim 96
        have 32 numbers in common, and equal sums of them."""
        return (0,) if self.head_dim == 64 else (0, self.head_dim - 64)

    @property
    def swizzled(self) -> int:
        """Numbers of a value that stand side by side in shared memory."""
        return math.gcd(self.head_dim, 64)


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


class Memory(NamedTuple):
    """Shared memory and barriers: a ring of keys and values, two slots of queries, and what each
    consumer writes for the tensor core. `full` and `empty` say whose turn a slot is, `reduce` which
    consumer's to reduce across its warps: Mosaic has one scratch a block."""

    keys: Any
    values: Any
    queries: Any
    weights: Any
    float16_values: Any
    full: Any
    empty: Any
    queries_full: Any
    queries_empty: Any
    reduce: Any


def memory_of(sizes: Sizes, query, key, value, blocks: int) -> tuple[Memory, int]:
    """Shared memory of a block, and the slots of its ring: what the rest of its share of a
    multiprocessor's leaves, 6 at most.

    Args:
        query, key, value: dtypes.
        blocks: of a multiprocessor.
    """
    dim, width, swizzled = sizes.head_dim, sizes.width, sizes.swizzled
    consumers = sizes.consumers
    weight = jnp.float16 if jnp.dtype(value).itemsize == 1 else value
    queries, weights = (2, consumers, width, dim), (consumers, width, STEP)
    float16_values = (consumers, STEP, dim)
    fixed = _bytes(queries, query) + _bytes(weights, weight) + _scratch(width)
    fixed += _bytes(float16_values, weight) if weight != value else 0
    share = mosaic.SMEM_OF_MULTIPROCESSOR // blocks - 1024
    step = _bytes((STEP, dim), key) + _bytes((STEP, dim), value)
    stages = min(6, (min(share, mosaic.SMEM_BYTES) - 2048 - fixed) // step)
    return (
        Memory(
            keys=mosaic.tiled((stages, STEP, dim), key),
            values=mosaic.tiled((stages, STEP, dim), value, swizzled),
            queries=mosaic.tiled(queries, query),
            weights=mosaic.tiled(weights, weight, swizzled),
            float16_values=mosaic.tiled(float16_values, weight, swizzled)
            if weight != value
            else None,
            full=mosaic.Barrier(num_arrivals=2, num_barriers=stages),
            empty=mosaic.Barrier(num_arrivals=consumers, num_barriers=stages),
            queries_full=mosaic.Barrier(num_arrivals=consumers, num_barriers=2),
            queries_empty=mosaic.Barrier(num_arrivals=consumers, num_barriers=2),
            reduce=mosaic.Barrier(num_barriers=2) if consumers == 2 else None,
        ),
        stages,
    )


def _scratch(width: int) -> int:
    """Bytes for a reduction over keys: what all warps hold of 16 columns at a time, with which a
    thread's registers suffice."""
    return 128 * min(width, 16)


def _bytes(shape, dtype):
    return math.prod(shape) * jnp.dtype(dtype).itemsize


class Block(NamedTuple):
    """What the warpgroups of a block have in common.

    Attributes:
        stages: slots of the ring.
        tiles: how many there are, which may be fewer than were launched for.
        pages, spans: in global memory, as `chunks` takes them.
    """

    sizes: Sizes
    memory: Memory
    stages: int
    tiles: Any
    pages: Any
    spans: Any

    def over_tiles(self, one):
        """Run `one` for this block's share of the tiles, with the steps before each, and how many
        tiles with steps; return both for all."""
        block, blocks = lax.axis_index("block"), lax.axis_size("block")
        own = lax.div(jnp.maximum(self.tiles - block + blocks - 1, 0), blocks)

        def next_tile(i, counts):
            tile, (steps, turn) = self.tile(block + i * blocks), counts
            mosaic.when(tile.steps > 0)(lambda: one(tile, steps, turn))
            return steps + tile.steps, turn + jnp.where(tile.steps > 0, 1, 0)

        return lax.fori_loop(0, own, next_tile, (jnp.int32(0), jnp.int32(0)))

    def tile(self, number) -> Tile:
        sizes, spans = self.sizes, self.spans
        part, rest = lax.rem(number, sizes.parts), lax.div(number, sizes.parts)
        head, rest = lax.rem(rest, sizes.kv_heads), lax.div(rest, sizes.kv_heads)
        row, chunk = lax.rem(rest, sizes.rows), lax.div(rest, sizes.rows)
        end, per_chunk = spans[0, row, part], CHUNK // STEP
        begin = jnp.maximum(chunk * per_chunk, spans[1, row, part])
        until = jnp.minimum((chunk + 1) * per_chunk, lax.div(end + STEP - 1, STEP))
        return Tile(chunk, row, head, part, begin, jnp.maximum(until - begin, 0), end)

    def columns(self, tile: Tile, consumer):
        """A consumer's queries of a row."""
        width = self.sizes.width
        return mosaic.ds(mosaic.multiple_of(tile.part * QUERIES + consumer * width, width), width)

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

    def produce(self, query, keys, values):
        """Load, on a warpgroup of its own: a tile's queries, and keys and values into the ring."""
        memory, stages, sizes = self.memory, self.stages, self.sizes

        def load_tile(tile: Tile, count, turn):
            slot = lax.rem(turn, 2)
            mosaic.when(turn >= 2)(lambda: mosaic.barrier_wait(memory.queries_empty.at[slot]))
            for consumer in range(sizes.consumers):
                mosaic.copy_gmem_to_smem(
                    query.at[tile.row, tile.head, self.columns(tile, consumer)],
                    memory.queries.at[slot, consumer],
                    memory.queries_full.at[slot],
                )

            def load_step(i, _):
                slot = lax.rem(count + i, stages)
                _, row, at_slot = self.place(tile.row, tile.begin + i)
                mosaic.when(count + i >= stages)(lambda: mosaic.barrier_wait(memory.empty.at[slot]))
                here, full = (row, tile.head, mosaic.ds(at_slot, STEP)), memory.full.at[slot]
                mosaic.copy_gmem_to_smem(keys.at[here], memory.keys.at[slot], full)
                mosaic.copy_gmem_to_smem(values.at[here], memory.values.at[slot], full)

            lax.fori_loop(0, tile.steps, load_step, None)

        steps, turns = self.over_tiles(load_tile)
        # every slot that was used is still to be handed back
        for handed, slots, used in (
            (memory.queries_empty, 2, turns),
            (memory.empty, stages, steps),
        ):
            for slot in range(slots):
                mosaic.when(slot < used)(
                    lambda handed=handed, slot=slot: mosaic.barrier_wait(handed.at[slot])
                )

    def consume(self, wg, scale, limits, bounded, stats, sums):
        """Multiply, on each of the consumers: all steps of a tile, whose sums are then written."""
        memory, stages, sizes = self.memory, self.stages, self.sizes
        bounded_below, bounded_above = bounded
        by_query, shape = mosaic.Layout.WGMMA.reduce(0), (STEP, sizes.width)

        def over_keys(reduce, x):
            if memory.reduce is None:
                return reduce(x, axis=0)
            mosaic.barrier_wait(memory.reduce.at[wg])
            reduced = reduce(x, axis=0)
            mosaic.barrier_arrive(memory.reduce.at[1 - wg])
            return reduced

        def attend(tile: Tile, count, turn):
            slot_of_queries = lax.rem(turn, 2)
            score_scale, columns = scale[tile.head], self.columns(tile, wg)
            mosaic.barrier_wait(memory.queries_full.at[slot_of_queries])

            def attend_step(i, carry):
                top, total, out = carry
                step, slot = tile.begin + i, lax.rem(count + i, stages)
                page, _, at_slot = self.place(tile.row, step)
                keys = jnp.where(
                    page < 0, 0, jnp.minimum(tile.end - step * STEP, sizes.slots - at_slot)
                )
                mosaic.barrier_wait(memory.full.at[slot])

                def multiply(acc):
                    queries = memory.queries.at[slot_of_queries, wg]
                    mosaic.wgmma(acc, memory.keys.at[slot], queries.transpose((1, 0)))
                    return acc[...] * score_scale

                scores = mosaic.run_scoped(multiply, mosaic.ACC(shape, jnp.float32))
                bounds = [
                    mosaic.load(limit.at[tile.row, columns], layout=by_query, optimized=False)
                    for limit in limits
                ]
                bounds = [lax.broadcast_in_dim(bound, shape, [1]) for bound in bounds]
                key = mosaic.broadcasted_iota(jnp.int32, shape, 0, layout=mosaic.Layout.WGMMA)
                visible = key < keys
                if bounded_below:
                    visible = visible & (key + step * STEP >= bounds[0])
                if bounded_above:
                    visible = visible & (key + step * STEP < bounds[-1])
                scores = jnp.where(visible, scores, -jnp.inf)
                higher = jnp.maximum(
                    top,
                    lax.round(over_keys(jnp.max, scores), lax.RoundingMethod.TO_NEAREST_EVEN),
                )
                weights = jnp.exp2(scores - lax.broadcast_in_dim(higher, shape, [1]))
                rescale = _power_of_two(top - higher)
                weights = weights.astype(memory.weights.dtype)
                # What the tensor core reads is written behind the reduction's barriers: each warp
                # came to them with its product of the step before
                values = memory.values.at[slot]
                if memory.float16_values is not None:
                    e4m3 = mosaic.load(values, layout=mosaic.in_eights(sizes.swizzled))
                    values = memory.float16_values.at[wg]
                    values[...] = e4m3.astype(jnp.float32).astype(values.dtype)
                memory.weights.at[wg].transpose((1, 0))[...] = weights
                mosaic.commit_smem()
                if memory.float16_values is not None:
                    mosaic.barrier_arrive(memory.empty.at[slot])
                # the weights that are summed are those that multiply values, rounded: the error of
                # a large one cancels
                total = total * lax.broadcast_in_dim(rescale, shape, [1]) + weights.astype(
                    jnp.float32
                )

                def weigh(*accs):
                    for acc, column in zip(accs, sizes.columns, strict=True):
                        part = values.at[:, mosaic.ds(column, 64)]
                        mosaic.wgmma(
                            acc, part.transpose((1, 0)), memory.weights.at[wg].transpose((1, 0))
                        )
                    return [acc[...] for acc in accs]

                accs = [mosaic.ACC((64, sizes.width), jnp.float32) for _ in out]
                out = tuple(
                    part * lax.broadcast_in_dim(rescale, part.shape, [1]) + product
                    for part, product in zip(out, mosaic.run_scoped(weigh, *accs), strict=True)
                )
                if memory.float16_values is None:
                    mosaic.barrier_arrive(memory.empty.at[slot])
                return higher, total, out

            def filled(value, shape, layout):
                return mosaic.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            nothing = (
                filled(NO_KEY, sizes.width, by_query),
                filled(0.0, shape, mosaic.Layout.WGMMA),
                tuple(filled(0.0, (64, sizes.width), mosaic.Layout.WGMMA) for _ in sizes.columns),
            )
            top, total, out = lax.fori_loop(0, tile.steps, attend_step, nothing)
            mosaic.barrier_arrive(memory.queries_empty.at[slot_of_queries])
            place = (tile.chunk, tile.row, tile.head)
            stats[*place, 0, columns], stats[*place, 1, columns] = top, over_keys(jnp.sum, total)
            for column, part in zip(sizes.columns, out, strict=True):
                sums[*place, mosaic.ds(column, 64), columns] = part

        if memory.reduce is not None:
            mosaic.when(wg == 1)(lambda: mosaic.barrier_arrive(memory.reduce.at[0]))
        self.over_tiles(attend)
        if memory.reduce is not None:
            mosaic.when(wg == 0)(lambda: mosaic.barrier_wait(memory.reduce.at[0]))
