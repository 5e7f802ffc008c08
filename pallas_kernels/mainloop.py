"""The loop that every product on Hopper runs: dense or grouped, forward or gradient, many rows or
few, of FP8 numbers with scales or of 16-bit ones without.

One warpgroup loads tiles of both operands by TMA into a ring of slots; two multiply them. FP8
tensor cores add in a short accumulator (about 14 bits, DeepSeek-V3, arXiv 2412.19437, section
3.3.2), so no sum in it is longer than one block of 128 bytes: each block's product starts from
zero, is scaled, and is added in float32 registers in the order of the contraction. A tile's bits
therefore depend on its own rows and columns, and on nothing else that the kernel computes. Blocks
are multiplied in pairs, so that one is added while the tensor cores have the other.

Both operands are [rows, k] with k contiguous, as FP8 wgmma wants them. What lies behind an edge is
loaded as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic

BLOCK_K = 128  # of FP8 numbers: what a scale serves
CONSUMERS, WGMMA_ROWS = 2, 64
TILE_ROWS = CONSUMERS * WGMMA_ROWS  # of the left operand: what one block multiplies


def block_of(dtype: jnp.dtype) -> int:
    """Numbers of the contraction that are multiplied at a time: 128 bytes."""
    return BLOCK_K // jnp.dtype(dtype).itemsize


class Place(NamedTuple):
    """Where a tile's operands begin: rows of both, rows of their 128-row scales, and its blocks of
    the contraction; and which of several left operands it has."""

    lhs: Any
    rhs: Any
    lhs_block: Any
    rhs_block: Any
    first: Any
    steps: Any
    array: Any = 0


@dataclass(frozen=True)
class Side:
    """One operand.

    Attributes:
        dtype: of its values.
        rows: of its tile.
        scales: one a row, stored [k blocks, rows]; or one for every 128 rows, stored [row blocks,
            k blocks]; or none.
        shared: the blocks of a cluster have the same tile, and each loads a part of its values for
            all of them.
    """

    dtype: jnp.dtype
    rows: int
    scales: Literal["row", "block", "none"]
    shared: bool = False

    @property
    def by_row(self) -> bool:
        return self.scales == "row"

    def scratch(self, stages: int) -> tuple[Any, Any]:
        return (
            mosaic.tiled((stages, self.rows, block_of(self.dtype)), self.dtype),
            # each slot begins at 128 bytes, where TMA may write
            mosaic.SMEM((stages, max(self.rows, 32)), jnp.float32) if self.by_row else None,
        )


class Ring(NamedTuple):
    """Slots of loaded tiles; `full` and `empty` say whose turn each is."""

    lhs: tuple[Any, Any]
    rhs: tuple[Any, Any]
    full: Any
    empty: Any


def ring_scratch(lhs: Side, rhs: Side, stages: int) -> Ring:
    """Allocate a ring of `stages` slots."""
    copies = 2 + lhs.by_row + rhs.by_row
    shared = lhs.shared or rhs.shared
    return Ring(
        lhs.scratch(stages),
        rhs.scratch(stages),
        mosaic.Barrier(num_arrivals=copies, num_barriers=stages),
        # where another block writes into a slot, it has to be free in both
        mosaic.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=CONSUMERS, num_barriers=stages
        )
        if shared
        else mosaic.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    )


def run(
    lhs: tuple[Side, Any, Any],
    rhs: tuple[Side, Any, Any],
    ring: Ring,
    tiles: int,
    stages: int,
    place: Callable[[jax.Array], Place],
    finish: Callable[[jax.Array, jax.Array, Callable], None],
) -> None:
    """Run all tiles of a kernel's body, on the warpgroup that calls it.

    Args:
        lhs, rhs: the sides, and their values and scales in global memory; of the left one, tuples
            of arrays where each tile has one of several.
        ring: what `ring_scratch` allocated.
        tiles: how many.
        stages: slots of the ring.
        place: of a tile's number.
        finish: called with a tile's number, the consumer's number and `total`, which maps (first
            step, steps) to the float32 sum over these blocks, [64, rhs rows]. The parts that it
            asks for must be all of the tile's, in order.
    """
    wg, block = lax.axis_index("wg"), block_of(lhs[0].dtype)
    # registers of a loading and of a multiplying thread: scales of 128 columns take 32 more
    few, many = (24, 240) if rhs[0].by_row and rhs[0].rows == 128 else (40, 232)

    def over_tiles(one):
        def body(info, carry):
            return one(info.index[0], carry)

        return mosaic.nd_loop((tiles,), collective_axes="block", init_carry=jnp.int32(0))(body)

    def load(tile, count):
        at = place(tile)

        def step(i, count):
            slot, k = lax.rem(count, stages), at.first + i
            mosaic.when(count >= stages)(lambda: mosaic.barrier_wait(ring.empty.at[slot]))
            for (side, values, scales), (to, scales_to), row in (
                (lhs, ring.lhs, at.lhs),
                (rhs, ring.rhs, at.rhs),
            ):
                rows, full = mosaic.ds(row, side.rows), ring.full.at[slot]
                sources = values if isinstance(values, tuple) else (values,)
                part, blocks = mosaic.ds(k * block, block), "cluster" if side.shared else None
                here = partial(_load_tile, (rows, part), to.at[slot], full, blocks)
                mosaic.choose(at.array, [partial(here, source) for source in sources])
                if side.by_row:
                    mosaic.copy_gmem_to_smem(
                        scales.at[k, rows], scales_to.at[slot, mosaic.ds(0, side.rows)], full
                    )
            return count + 1

        return lax.fori_loop(0, at.steps, step, count)

    def sum_of(at, count, first, steps):
        """The sum over `steps` blocks from `first` on, of which the ring has had `count` before."""
        (left, _, left_scales), (right, _, right_scales) = lhs, rhs
        shape = (WGMMA_ROWS, right.rows)
        own = mosaic.ds(wg * WGMMA_ROWS, WGMMA_ROWS)

        def block_scales(i):
            """What blocks i and i + 1 are multiplied by as a whole: loaded long before."""
            last = jnp.maximum(steps - 1, 0)
            scales = []
            for k in (first + jnp.minimum(i + j, last) for j in range(2)):
                scale = 1.0
                if left.scales == "block":
                    scale = _scale_of(left_scales, at.array, at.lhs_block, k)
                if right.scales == "block":
                    scale = scale * right_scales[at.rhs_block, k]
                scales.append(scale)
            return tuple(scales)

        def scales_of(slot, scale):
            """What a slot's product is multiplied by: a number a row, a number a column."""
            rows = columns = None
            if left.by_row:
                rows = mosaic.load(
                    ring.lhs[1].at[slot, own], layout=mosaic.Layout.WGMMA.reduce(1), optimized=False
                )
                rows = lax.broadcast_in_dim(rows * scale, shape, [0])
            if right.by_row:
                of_slot = ring.rhs[1].at[slot, mosaic.ds(0, right.rows)]
                columns = mosaic.load(
                    of_slot, layout=mosaic.Layout.WGMMA.reduce(0), optimized=False
                )
                columns = columns if left.by_row else columns * scale
                columns = lax.broadcast_in_dim(columns, shape, [1])
            return rows, columns

        def after(slot):
            return lax.select(slot == stages - 1, 0, slot + 1)

        def add(slots, total, scales):
            """Add the blocks in these slots to `total`, each while the tensor cores have the next
            one."""
            # all before the first product: the assembler waits for a product that is under way
            # where the zeros that another one begins with are written
            for slot in slots:
                mosaic.barrier_wait(ring.full.at[slot])

            def multiply_and_add(*products):
                for slot, product in zip(slots, products, strict=True):
                    mosaic.wgmma(
                        product, ring.lhs[0].at[slot, own], ring.rhs[0].at[slot].transpose((1, 0))
                    )
                result = total
                for j, (slot, product) in enumerate(zip(slots, products, strict=True)):
                    rows, columns = scales_of(slot, scales[j])
                    part = mosaic.wgmma_accumulator_load(product, wait_n=len(slots) - 1 - j)
                    mosaic.commit_smem()  # the next load of the slot is another proxy's write
                    mosaic.barrier_arrive(ring.empty.at[slot])
                    part = part if rows is None else part * rows
                    result = result + (part if columns is None else part * columns)
                return result

            return mosaic.run_scoped(
                multiply_and_add, *[mosaic.ACC(shape, jnp.float32)] * len(slots)
            )

        def pair(number, carry):
            total, slot, scales = carry
            following = block_scales(2 * number + 2)
            total = add((slot, after(slot)), total, scales)
            return total, after(after(slot)), following

        pairs = lax.div(steps, 2)
        zero = mosaic.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.Layout.WGMMA)
        # carried, because a division by the number of slots takes long where it is no power of two
        slot = lax.rem(count, stages)
        total, slot, scales = lax.fori_loop(0, pairs, pair, (zero, slot, block_scales(0)))
        return lax.fori_loop(
            2 * pairs, steps, lambda i, total: add((slot,), total, scales[:1]), total
        )

    def multiply(tile, count):
        at = place(tile)
        finish(tile, wg, lambda first, steps: sum_of(at, count + first, at.first + first, steps))
        return count + at.steps

    @mosaic.when(wg == CONSUMERS)
    def _():
        mosaic.set_max_registers(few, action="decrease")
        count = over_tiles(load)
        # the consumers hand back every slot that was used
        for slot in range(stages):
            mosaic.when(slot < count)(lambda slot=slot: mosaic.barrier_wait(ring.empty.at[slot]))

    @mosaic.when(wg < CONSUMERS)
    def _():
        mosaic.set_max_registers(many, action="increase")
        over_tiles(multiply)
        mosaic.wait_smem_to_gmem(0)


def _load_tile(part, to, full, blocks, source):
    mosaic.copy_gmem_to_smem(source.at[*part], to, full, collective_axes=blocks)


def _scale_of(scales, number, block, k):
    """The scale of a 128-row block in one of several arrays."""
    if not isinstance(scales, tuple):
        return scales[block, k]
    found = 1.0
    for i, array in enumerate(scales):
        # a block of another array may be none of this one
        scale = array[jnp.minimum(block, array.shape[0] - 1), k]
        found = scale if i == 0 else jnp.where(number == i, scale, found)
    return found
