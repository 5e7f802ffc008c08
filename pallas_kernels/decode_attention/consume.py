"""The warpgroups of the chunk kernel that multiply: each over its steps of a tile, then joined and
written."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.decode_attention.memory import Memory
from pallas_kernels.decode_attention.tiles import (
    CONSUMERS,
    NOTHING,
    ROWS,
    STEP,
    Sizes,
    Tile,
    slot_of,
)


def consume(at: Sizes, over, memory: Memory, stages, wg, inputs):
    pages, scale, (bounded_below, bounded_above), stats, sums = inputs
    by_row = mosaic.Layout.WGMMA.reduce(1)
    shape = (ROWS, STEP)

    def attend(tile: Tile, count, turn):
        asked, (start, steps) = lax.rem(turn, 2), tile.own(wg)
        score_scale = scale[tile.head]
        mosaic.barrier_wait(memory.asked.at[asked])
        limits = [
            mosaic.load(limit.at[asked], layout=by_row, optimized=False) for limit in memory.limits
        ]
        limits = [lax.broadcast_in_dim(limit, shape, [0]) for limit in limits]

        def one(i, carry):
            top, total, out = carry
            step, slot = start + i * CONSUMERS, wg * stages + lax.rem(count + i, stages)
            page, _, at_slot = slot_of(at, pages, tile.row, step)
            seen = jnp.where(page < 0, 0, jnp.minimum(tile.end - step * STEP, at.slots - at_slot))
            mosaic.barrier_wait(memory.full.at[slot])
            values = memory.values.at[slot]
            if memory.wide is not None:
                narrow = mosaic.load(values, layout=mosaic.Layout.WGMMA_UPCAST_4X, optimized=False)
                values = memory.wide.at[wg]
                values[...] = narrow.astype(jnp.float32).astype(values.dtype)
            scores = (
                _product(memory.queries.at[asked], memory.keys.at[slot].transpose((1, 0)), shape)
                * score_scale
            )
            key = mosaic.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.Layout.WGMMA)
            visible = key < seen
            if bounded_below:
                visible = visible & (key + step * STEP >= limits[0])
            if bounded_above:
                visible = visible & (key + step * STEP < limits[-1])
            scores = jnp.where(visible, scores, -jnp.inf)
            higher = jnp.maximum(
                top, lax.round(scores.max(axis=1), lax.RoundingMethod.TO_NEAREST_EVEN)
            )
            weights, rescale = (
                jnp.exp2(scores - lax.broadcast_in_dim(higher, shape, [0])),
                jnp.exp2(top - higher),
            )
            weights = weights.astype(memory.weights.dtype)
            memory.weights[wg] = weights
            # of what multiplies: one large weight cancels
            total = total * rescale + weights.astype(jnp.float32).sum(axis=1)
            mosaic.commit_smem()
            if memory.wide is not None:
                mosaic.barrier_arrive(memory.empty.at[slot])
            out = out * lax.broadcast_in_dim(rescale, out.shape, [0]) + _product(
                memory.weights.at[wg], values, out.shape
            )
            if memory.wide is None:
                mosaic.barrier_arrive(memory.empty.at[slot])
            return higher, total, out

        def filled(value, shape, layout):
            return mosaic.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        nothing = (filled(NOTHING, ROWS, by_row), filled(0.0, ROWS, by_row))
        nothing = (*nothing, filled(0.0, (ROWS, at.head_dim), mosaic.Layout.WGMMA))
        found = lax.fori_loop(0, steps, one, nothing)
        if limits:
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
        other_top, other_total = (
            mosaic.load(memory.stats.at[i], layout=by_row, optimized=False) for i in range(2)
        )
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
