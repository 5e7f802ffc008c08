"""Grouped product in plain XLA: tiles of rows, on a TPU ragged_dot, of the dequantized operands.

XLA's own ragged product multiplies every row with every group's weight on a CPU and on a GPU, and
keeps one of them. So there every group's rows begin a tile of their own, and each tile meets one
weight; on a GPU several at a time, whose weights are copied side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.rounding import full_precision

BY_ROW = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
FEWEST_ROWS, MOST_ROWS = 8, 128
"""Of a tile."""
TOGETHER = 8
"""Tiles that a GPU multiplies at one time."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dot(x, w, group_sizes, over=-1, dtype=jnp.float32):
    """Multiply x [m, k], sorted by group, with w [groups, n, k] transposed, accumulated in float32;
    with w [groups, k, n] where -2 is the axis that is summed. `dtype` is that of the computation
    that it is a part of.

    Zero behind the last group.
    """
    chosen = {"over": over, "precision": full_precision(x, dtype)}
    return lax.platform_dependent(
        x,
        w,
        group_sizes,
        cpu=partial(_tiled_dot, **chosen),
        cuda=partial(_tiled_dot, **chosen, together=TOGETHER),
        default=partial(_ragged_dot, **chosen),
    )


def _dot_backward(over, dtype, operands, dy):
    x, w, group_sizes = operands
    # XLA's products take operands of one dtype
    dy = dy.astype(jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32))
    dx = dot(dy, w.astype(dy.dtype), group_sizes, -3 - over, dtype)
    sides = (dy, x.astype(dy.dtype)) if over == -1 else (x.astype(dy.dtype), dy)
    return dx.astype(x.dtype), outer_product(*sides, group_sizes, dtype).astype(w.dtype), None


dot.defvjp(lambda *operands: (dot(*operands), operands[:3]), _dot_backward)


def _ragged_dot(x, w, group_sizes, over, precision):
    by_row = lax.RaggedDotDimensionNumbers((((1,), (3 + over,)), ((), ())), [0], [0])
    out = lax.ragged_dot_general(x, w, group_sizes, by_row, precision, jnp.float32)
    # a backend need not write the rows behind the last group
    inside = jnp.arange(len(x)) < group_sizes.sum()
    return jnp.where(inside[:, None], out, 0.0)


def _tiled_dot(x, w, group_sizes, over, precision, together=None):
    contract = (((1,), (2 + over,)), ((), ()))

    def product(x, w):
        return lax.dot_general(x, w, contract, precision, jnp.float32)

    return dot_by_tiles(x, w, group_sizes, product, together)


def outer_product(dy, x, group_sizes, dtype=jnp.float32):
    """Multiply dy [m, n] transposed with x [m, k] over each group's rows, [groups, n, k]."""
    precision = full_precision(dy, dtype)
    tiled = partial(_tiled_outer_product, precision=precision)
    ragged = partial(_ragged_outer_product, precision=precision)
    return lax.platform_dependent(dy, x, group_sizes, cpu=tiled, cuda=tiled, default=ragged)


def _ragged_outer_product(dy, x, group_sizes, precision):
    inside = (jnp.arange(len(x)) < group_sizes.sum())[:, None]
    dy, x = jnp.where(inside, dy, 0.0), jnp.where(inside, x, 0.0)
    return lax.ragged_dot_general(dy, x, group_sizes, _OVER_ROWS, precision, jnp.float32)


def _tiled_outer_product(dy, x, group_sizes, precision):
    tiles = tiles_of(len(x), group_sizes)

    def add(total, tile):
        dy, x, group = tile
        part = lax.dot_general(dy, x, (((0,), (0,)), ((), ())), precision, jnp.float32)
        return total.at[group].add(part), None

    nothing = jnp.zeros((len(group_sizes), dy.shape[1], x.shape[1]), jnp.float32)
    # a tile behind the last group has zeros for rows
    return lax.scan(add, nothing, (tiles.spread(dy), tiles.spread(x), tiles.group))[0]


class Tiles(NamedTuple):
    """Rows that are sorted by group, in tiles of which each has rows of one group alone.

    Attributes:
        place: int32 [m], of each row among those of the tiles, beyond them where it has no group.
        group: int32 [tiles]; any where a tile has no rows.
        rows: of a tile.
    """

    place: Array
    group: Array
    rows: int

    def spread(self, x: Array) -> Array:
        """Lay x [m, k] out as [tiles, rows, k], zero where there is no row."""
        laid = lay_out(x, self.place, len(self.group) * self.rows)
        return laid.reshape(-1, self.rows, x.shape[1])

    def gather(self, out: Array) -> Array:
        """Take [tiles, rows, n] back to [m, n], zero behind the last group."""
        flat = out.reshape(-1, out.shape[-1])
        return jnp.take(flat, self.place, axis=0, mode="fill", fill_value=0)


def tiles_of(m: int, group_sizes: Array) -> Tiles:
    """Choose tiles of about as many rows as a group has."""
    groups = len(group_sizes)
    size = min(MOST_ROWS, max(FEWEST_ROWS, 1 << (m // groups).bit_length() >> 1))
    place, aligned = align(m, group_sizes, size)
    count = aligned_rows(m, groups, size) // size
    group = jnp.searchsorted(jnp.cumsum(aligned) // size, jnp.arange(count), side="right")
    return Tiles(place, jnp.minimum(group, groups - 1), size)


def dot_by_tiles(
    x: Array,
    w: Array,
    group_sizes: Array,
    product: Callable[[Array, Array], Array],
    together: int | None = None,
) -> Array:
    """Multiply by tiles: `product` of a tile and its group's weight, one after the other or several
    `together`."""
    tiles = tiles_of(len(x), group_sizes)

    def one(tile_and_group):
        tile, group = tile_and_group
        return product(tile, lax.dynamic_index_in_dim(w, group, keepdims=False))

    return tiles.gather(lax.map(one, (tiles.spread(x), tiles.group), batch_size=together))


def align(rows, group_sizes, block):
    """Place sorted rows so that every group begins at a multiple of `block`.

    Those behind the last group fall out.
    """
    aligned = -(-group_sizes // block) * block
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    shift = jnp.cumsum(aligned) - aligned - (ends - group_sizes)
    outside = aligned_rows(rows, len(group_sizes), block)
    return jnp.where(
        group < len(group_sizes),
        jnp.arange(rows) + shift[jnp.minimum(group, len(shift) - 1)],
        outside,
    ), aligned


def lay_out(x, place, rows):
    """Put each row of x at its place among so many, zeros between; those beyond fall out."""
    return jnp.zeros((rows, x.shape[1]), x.dtype).at[place].set(x, mode="drop")


def aligned_rows(rows, groups, block):
    """Count the most rows that alignment can need."""
    return -(-rows // block) * block + groups * block
