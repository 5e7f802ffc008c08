"""The warpgroup of the chunk kernel that loads: queries once a tile, keys and values into the ring
of the step's consumer."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.decode_attention.memory import Memory
from pallas_kernels.decode_attention.tiles import CONSUMERS, ROWS, STEP, Sizes, Tile, slot_of


def produce(at: Sizes, over, memory: Memory, stages, inputs):
    query, keys, values, pages, limits = inputs
    width = min(at.queries, ROWS)

    def load_queries(tile: Tile, turn):
        slot, rows = lax.rem(turn, 2), mosaic.ds(tile.part * ROWS, width)
        mosaic.when(turn >= 2)(lambda: mosaic.barrier_wait(memory.answered.at[slot]))
        here = mosaic.ds(0, width)
        mosaic.copy_gmem_to_smem(
            query.at[tile.row, tile.head, rows],
            memory.queries.at[slot, here],
            memory.asked.at[slot],
        )
        for limit, to in zip(limits, memory.limits, strict=True):
            mosaic.copy_gmem_to_smem(
                limit.at[tile.row, rows], to.at[slot, here], memory.asked.at[slot]
            )

    def load(tile: Tile, counts):
        *taken, turn = counts
        mosaic.when(tile.steps > 0)(lambda: load_queries(tile, turn))

        def one(i, _):
            step = tile.begin + i
            consumer = lax.rem(step, CONSUMERS)
            count = jnp.where(consumer == 0, *taken) + lax.div(
                step - tile.own(consumer)[0], CONSUMERS
            )
            slot = consumer * stages + lax.rem(count, stages)
            _, row, at_slot = slot_of(at, pages, tile.row, step)
            mosaic.when(count >= stages)(lambda: mosaic.barrier_wait(memory.empty.at[slot]))
            for source, to in ((keys, memory.keys), (values, memory.values)):
                here = source.at[row, tile.head, mosaic.ds(at_slot, STEP)]
                mosaic.copy_gmem_to_smem(here, to.at[slot], memory.full.at[slot])

        lax.fori_loop(0, tile.steps, one, None)
        return *(count + tile.own(i)[1] for i, count in enumerate(taken)), turn + jnp.where(
            tile.steps > 0, 1, 0
        )

    zero = jnp.int32(0)
    *taken, turn = over(load, (zero, zero, zero))
    # every slot that was used is still to be handed back
    for slot in range(2):
        mosaic.when(slot < turn)(lambda slot=slot: mosaic.barrier_wait(memory.answered.at[slot]))
    for i, count in enumerate(taken):
        for slot in range(stages):
            mosaic.when(slot < count)(
                lambda slot=i * stages + slot: mosaic.barrier_wait(memory.empty.at[slot])
            )
