"""Blockwise-scaled product on Hopper: many rows with x on the left of wgmma, few with the weight
there.

wgmma multiplies 64 rows of its left operand at least, and 8 of its right one. A decode step has
fewer than 64 rows, so there the weight goes left, and the contraction is split to keep all
multiprocessors loading. The split is a function of the weight's shape alone, and the parts are
added
in their order in both kernels: a row has the same sum whatever m is.
"""

from __future__ import annotations

from functools import partial

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
    ring_scratch,
    run,
)

FEW_ROWS = 128  # up to here the weight is the left operand
TILE_COLUMNS = 128
# multiprocessors of an H200; a constant, so that the order of a sum does not depend on the card
_WAVE = 132


def split_of(n: int, k: int) -> int:
    """Choose how many parts the contraction is split into.

    Of 1 to 4, the first that leaves the fewest multiprocessors idle at the end.
    """
    tiles, steps = -(-n // TILE_ROWS), -(-k // BLOCK_K)

    def busy(parts):
        return tiles * parts / (-(-tiles * parts // _WAVE) * _WAVE)

    return max((parts for parts in (1, 2, 3, 4) if parts == 1 or steps >= 4 * parts), key=busy)


def part_of(steps: int, split: int, part):
    """First 128-block of a part of the contraction."""
    return steps * part // split if isinstance(part, int) else lax.div(steps * part, split)


@mosaic.outlined("w_block", "out_dtype")
def matmul(x, x_scales, w, w_scales, w_block, out_dtype):
    (n, k), rows = w.shape, x.reshape(-1, x.shape[-1])
    m = len(rows)
    rows, x_scales = pad(rows, 8, BLOCK_K), pad(x_scales.reshape(m, -1), 8, 1).T
    w, by_row = pad(w, 8, BLOCK_K), w_block[0] == 1
    w_scales = pad(w_scales, 8, 1).T if by_row else w_scales
    product = few_rows if m <= FEW_ROWS else many_rows
    # a weight with a scale a row is the other half of a weight gradient: many rows, and nothing to
    # keep equal to
    out = product(rows, x_scales, w, w_scales, by_row, 1 if by_row else split_of(n, k), out_dtype)
    return out[:m, :n].reshape(*x.shape[:-1], n)


def pad(x, rows, columns):
    """x with both sides a multiple of these: Mosaic's tiled copies want whole tiles, of 8 rows and
    a swizzle's columns."""
    extra = [(0, -side % to) for side, to in zip(x.shape, (rows, columns), strict=True)]
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def many_rows(x, x_scales, w, w_scales, by_row, split, out_dtype):
    """Tiles of 128 x 128 of the result."""
    (m, k), n = x.shape, mosaic.whole_swizzles(len(w), out_dtype)
    left, right = Side(x.dtype, TILE_ROWS, True), Side(w.dtype, TILE_COLUMNS, by_row)
    grid, steps = (-(-m // TILE_ROWS), -(-n // TILE_COLUMNS)), -(-k // BLOCK_K)
    tiles, tile, float32_out = (
        grid[0] * grid[1],
        (CONSUMERS, WGMMA_ROWS, TILE_COLUMNS),
        out_dtype == jnp.float32,
    )
    # as many slots as leave room for the result, and for the sums of a split contraction where the
    # result is narrower
    stages = 5 if split == 1 and not float32_out else 4

    def body(x, x_scales, w, w_scales, out, ring, staged, sums):
        at = partial(mosaic.planar_snake, shape=grid, minor_dim=1, tile_width=8)

        def place(tile):
            i, j = at(tile)
            return Place(i * TILE_ROWS, j * TILE_COLUMNS, 0, j, 0, steps)

        def finish(tile, wg, total):
            i, j = at(tile)
            if split == 1:
                value = total(0, steps)
                mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                mosaic.wait_smem_to_gmem(0, wait_read_only=True)
                value = in_parts((staged if float32_out else sums).at[wg], total, steps, split)
            staged[wg] = value.astype(out_dtype)
            mosaic.commit_smem()
            rows = mosaic.ds(i * TILE_ROWS + wg * WGMMA_ROWS, WGMMA_ROWS)
            mosaic.copy_smem_to_gmem(
                staged.at[wg], out.at[rows, mosaic.ds(j * TILE_COLUMNS, TILE_COLUMNS)]
            )

        run((left, x, x_scales), (right, w, w_scales), ring, tiles, stages, place, finish)

    scratch = {
        "ring": ring_scratch(left, right, stages),
        "staged": mosaic.tiled(tile, out_dtype),
        "sums": mosaic.tiled(tile, jnp.float32) if split > 1 and not float32_out else None,
    }
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    return mosaic.launch(
        body, out, scratch=scratch, threads=CONSUMERS + 1, tiles=tiles, name="blockwise_matmul"
    )(x, x_scales, w, w_scales)


def in_parts(sums, total, steps, split):
    """The sum over the parts, one after the other. Registers hold one part and one product; the sum
    waits in shared memory."""
    sums[...] = mosaic.layout_cast(jnp.zeros(sums.shape, jnp.float32), mosaic.Layout.WGMMA)

    def one(part, _):
        first = part_of(steps, split, part)
        sums[...] = sums[...] + total(first, part_of(steps, split, part + 1) - first)

    lax.fori_loop(0, split, one, None)
    return sums[...]


def few_rows(x, x_scales, w, w_scales, by_row, split, out_dtype):
    """Tiles of 128 rows of the weight by all rows of x, a part of the contraction each; the parts
    are added afterwards."""
    (m, k), n = x.shape, len(w)
    columns = next(c for c in (8, 16, 32, 64, 128) if c >= m)
    left, right = Side(w.dtype, TILE_ROWS, by_row), Side(x.dtype, columns, True)
    steps, stages, tiles = -(-k // BLOCK_K), 4 if columns == 128 else 6, -(-n // TILE_ROWS) * split

    def body(x, x_scales, w, w_scales, out, ring, staged):
        def at(tile):
            return lax.div(tile, split), lax.rem(tile, split)

        def place(tile):
            i, part = at(tile)
            first = part_of(steps, split, part)
            return Place(i * TILE_ROWS, 0, i, 0, first, part_of(steps, split, part + 1) - first)

        def finish(tile, wg, total):
            i, part = at(tile)
            value = total(0, place(tile).steps)
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            staged[wg] = value
            mosaic.commit_smem()
            rows = mosaic.ds(i * TILE_ROWS + wg * WGMMA_ROWS, WGMMA_ROWS)
            mosaic.copy_smem_to_gmem(staged.at[wg], out.at[part, rows, mosaic.ds(0, columns)])

        run((left, w, w_scales), (right, x, x_scales), ring, tiles, stages, place, finish)

    scratch = {
        "ring": ring_scratch(left, right, stages),
        "staged": mosaic.tiled((CONSUMERS, WGMMA_ROWS, columns), jnp.float32),
    }
    out = jax.ShapeDtypeStruct((split, n, columns), jnp.float32)
    parts = mosaic.launch(
        body,
        out,
        scratch=scratch,
        threads=CONSUMERS + 1,
        tiles=tiles,
        name="blockwise_matmul_few_rows",
    )(x, x_scales, w, w_scales)
    value = jnp.zeros(parts.shape[1:], jnp.float32)
    for part in parts:
        value = value + part
    return value.T.astype(out_dtype)
