"""Products of sorted rows on Hopper: the dense loop over tiles that each serve one group.

How many rows a group has is known at run time only. A tile is 128 rows, of which some are its
group's; small arrays made before the kernel say which. The first tile of a group begins at the
multiple of 8 before it, because TMA loads rows in eights. Rows of other groups in a tile are
multiplied in vain: only the group's are stored, in stretches of 64, 32, ... 1 rows, because the
size of a TMA store is fixed at compile time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mainloop import (
    BLOCK_K,
    CONSUMERS,
    TILE_ROWS,
    WGMMA_ROWS,
    Place,
    Side,
    block_of,
    ring_scratch,
    run,
)
from pallas_kernels.matmul.hopper import TILE_COLUMNS, pad

ROWS_OF_TMA = 8


class RowTiles(NamedTuple):
    """Tiles of rows, int32 [tiles] each.

    Attributes:
        group: of each tile; the number of groups for what is behind the last.
        start: the tile's first row.
        low, high: from which to which row of the tile the group reaches.
    """

    group: jax.Array
    start: jax.Array
    low: jax.Array
    high: jax.Array


def row_tiles(m: int, group_sizes) -> RowTiles:
    """Make as many tiles as m rows in so many groups can need; those too many have no rows."""
    groups = len(group_sizes)
    sizes = jnp.append(group_sizes, jnp.maximum(m - group_sizes.sum(), 0)).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    begins = ends - sizes
    first = begins // ROWS_OF_TMA * ROWS_OF_TMA
    tiles = jnp.where(sizes > 0, -(-(ends - first) // TILE_ROWS), 0)
    last = jnp.cumsum(tiles)
    index = jnp.arange(
        (m + (ROWS_OF_TMA - 1) * (groups + 1)) // TILE_ROWS + groups + 1, dtype=jnp.int32
    )
    # a comparison with each: the default is a loop of launches
    group = jnp.searchsorted(last, index, side="right", method="compare_all").astype(jnp.int32)
    served = jnp.minimum(group, groups)
    start = first[served] + (index - (last - tiles)[served]) * TILE_ROWS
    low, high = (jnp.clip(edge[served] - start, 0, TILE_ROWS) for edge in (begins, ends))
    start, low, high = (jnp.where(group <= groups, x, 0) for x in (start, low, high))
    return RowTiles(served, start, low, high)


@mosaic.outlined("out_dtype")
def matmul(x, x_scales, w, w_scales, group_sizes, out_dtype):
    scales = pad(x_scales, 8, 1).T, w_scales.reshape(-1, w_scales.shape[-1])
    return _product((x, scales[0]), (w, scales[1]), group_sizes, out_dtype, "grouped_matmul")


@mosaic.outlined("out_dtype")
def dot(x, w, group_sizes, out_dtype):
    """`matmul` of one 16-bit dtype, without scales."""
    return _product((x, None), (w, None), group_sizes, out_dtype, "invariant_grouped_matmul")


def _product(x, w, group_sizes, out_dtype, name):
    """Rows times their groups' weights: operands with their scales as `mainloop` reads them."""
    (x, x_scales), (w, w_scales) = x, w
    (groups, n, k), m, block = w.shape, len(x), block_of(x.dtype)
    x = pad(x, 8, block)
    w = jnp.pad(w, ((0, 0), (0, -n % 8), (0, -k % block))) if n % 8 or k % block else w
    width, blocks = w.shape[1], 0 if w_scales is None else len(w_scales) // groups
    tiles, steps = row_tiles(m, group_sizes), -(-k // block)
    grid = (len(tiles.group), -(-n // TILE_COLUMNS))
    left = Side(x.dtype, TILE_ROWS, "none" if x_scales is None else "row")
    right = Side(w.dtype, TILE_COLUMNS, "none" if w_scales is None else "block")
    stages = 4 if out_dtype == jnp.float32 else 5  # as many slots as leave room for the result

    def body(x, w, of_tile, out, ring, staged):
        group, start, low, high = of_tile

        def at(tile):
            return mosaic.planar_snake(tile, grid, 1, 8)

        def place(tile):
            i, j = at(tile)
            g = group[i]
            real = jnp.where((g < groups) & (high[i] > low[i]), steps, 0)
            g = jnp.minimum(g, groups - 1)
            row = mosaic.multiple_of(start[i], ROWS_OF_TMA)
            return Place(row, g * width + j * TILE_COLUMNS, 0, g * blocks + j, 0, real)

        def finish(tile, wg, total):
            i, j = at(tile)
            value = total(0, place(tile).steps)
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            own = mosaic.multiple_of(wg * WGMMA_ROWS, WGMMA_ROWS)
            staged[mosaic.ds(own, WGMMA_ROWS)] = value.astype(out_dtype)
            mosaic.commit_smem()
            first, last = (jnp.clip(edge[i], own, own + WGMMA_ROWS) for edge in (low, high))
            store_rows(
                staged,
                out,
                first,
                last - first,
                start[i],
                mosaic.ds(j * TILE_COLUMNS, TILE_COLUMNS),
            )

        run((left, *x), (right, *w), ring, grid[0] * grid[1], stages, place, finish)

    scratch = {
        "ring": ring_scratch(left, right, stages),
        "staged": mosaic.SMEM((TILE_ROWS, TILE_COLUMNS), out_dtype),
    }
    out = jax.ShapeDtypeStruct((m, grid[1] * TILE_COLUMNS), out_dtype)
    launched = mosaic.launch(
        body,
        out,
        scratch=scratch,
        threads=CONSUMERS + 1,
        tiles=grid[0] * grid[1],
        name=name,
    )
    return launched((x, x_scales), (w.reshape(groups * width, -1), w_scales), tiles)[:, :n]


def store_rows(staged, out, first, rows, start, columns):
    """At most 64 staged rows, from row `first` on, to the rows of `out` that lie `start` further
    on."""
    stretch = WGMMA_ROWS
    while stretch:

        def store(first=first, stretch=stretch):
            at = mosaic.ds(start + first, stretch), columns
            mosaic.copy_smem_to_gmem(staged.at[mosaic.ds(first, stretch)], out.at[at])

        mosaic.when((rows & stretch) != 0)(store)
        first, stretch = first + (rows & stretch), stretch // 2


@mosaic.outlined()
def outer_products(dy, dy_scales, x, x_scales, group_sizes):
    """[m, n] and [m, k] -> [groups, n, k]; every group begins at a multiple of 128 rows."""
    n, k, groups = dy.shape[1], x.shape[1], len(group_sizes)
    dy, x = pad(dy.T, 8, BLOCK_K), pad(x.T, 8, BLOCK_K)
    dy_scales, x_scales = pad(dy_scales, 1, 8), pad(x_scales, 1, 8)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32) // BLOCK_K
    firsts = ends - group_sizes.astype(jnp.int32) // BLOCK_K
    grid = (-(-n // TILE_ROWS), -(-k // TILE_COLUMNS))
    left, right = Side(dy.dtype, TILE_ROWS, "row"), Side(x.dtype, TILE_COLUMNS, "row")
    tiles, stages = groups * grid[0] * grid[1], 4

    def body(dy, dy_scales, x, x_scales, firsts, ends, out, ring, staged):
        def at(tile):
            inner = grid[0] * grid[1]
            return lax.div(tile, inner), *mosaic.planar_snake(lax.rem(tile, inner), grid, 1, 8)

        def place(tile):
            g, i, j = at(tile)
            return Place(i * TILE_ROWS, j * TILE_COLUMNS, 0, 0, firsts[g], ends[g] - firsts[g])

        def finish(tile, wg, total):
            g, i, j = at(tile)
            value = total(0, place(tile).steps)
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            staged[wg] = value
            mosaic.commit_smem()
            rows = mosaic.ds(i * TILE_ROWS + wg * WGMMA_ROWS, WGMMA_ROWS)
            mosaic.copy_smem_to_gmem(
                staged.at[wg], out.at[g, rows, mosaic.ds(j * TILE_COLUMNS, TILE_COLUMNS)]
            )

        run((left, dy, dy_scales), (right, x, x_scales), ring, tiles, stages, place, finish)

    scratch = {
        "ring": ring_scratch(left, right, stages),
        "staged": mosaic.tiled((CONSUMERS, WGMMA_ROWS, TILE_COLUMNS), jnp.float32),
    }
    out = jax.ShapeDtypeStruct(
        (groups, len(dy), mosaic.whole_swizzles(len(x), jnp.float32)), jnp.float32
    )
    return mosaic.launch(
        body, out, scratch=scratch, threads=CONSUMERS + 1, tiles=tiles, name="grouped_outer_product"
    )(dy, dy_scales, x, x_scales, firsts, ends)[:, :n, :k]
