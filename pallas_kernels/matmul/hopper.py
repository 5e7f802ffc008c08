"""Products on Hopper: many rows with x on the left of wgmma, few with the weight there.

wgmma multiplies 64 rows of its left operand at least, and 8 of its right one. A decode step has
fewer than 64 rows, so there the weight goes left, and the contraction is split to keep all
multiprocessors loading. The split is a function of the weight's shape alone, and the parts are
added in their order in both kernels: a row has the same sum whatever m is.
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
    block_of,
    ring_scratch,
    run,
)
from pallas_kernels.rounding import rounded

FEW_ROWS = 128  # up to here the weight is the left operand
TILE_COLUMNS = 128
# multiprocessors of an H200; a constant, so that the order of a sum does not depend on the card
_WAVE = 132


def split_of(n: int, steps: int) -> int:
    """Choose how many parts a contraction of so many blocks is split into.

    Of 1 to 4, the first that leaves the fewest multiprocessors idle at the end.
    """
    tiles = -(-n // TILE_ROWS)

    def busy(parts):
        return tiles * parts / (-(-tiles * parts // _WAVE) * _WAVE)

    return max((parts for parts in (1, 2, 3, 4) if parts == 1 or steps >= 4 * parts), key=busy)


def part_of(steps: int, split: int, part):
    """First 128-block of a part of the contraction."""
    return steps * part // split if isinstance(part, int) else lax.div(steps * part, split)


@mosaic.outlined("w_block", "out_dtype")
def matmul(x, x_scales, w, w_scales, w_block, out_dtype):
    rows, by_row = x.reshape(-1, x.shape[-1]), w_block[0] == 1
    x_scales = pad(x_scales.reshape(len(rows), -1), 8, 1).T
    w_scales = pad(w_scales, 8, 1).T if by_row else w_scales
    # a weight with a scale a row is the other half of a weight gradient: many rows, and nothing to
    # keep equal to
    split = 1 if by_row else split_of(len(w), -(-w.shape[1] // BLOCK_K))
    scales, name = ("row", "row" if by_row else "block"), "blockwise_matmul"
    out = _product((rows, x_scales), (w, w_scales), scales, split, out_dtype, name)
    return out.reshape(*x.shape[:-1], -1)


@mosaic.outlined("out_dtype")
def dot(x, w, out_dtype):
    """x [m, k] times the transpose of w [n, k], of one 16-bit dtype."""
    split = split_of(len(w), -(-w.shape[1] // block_of(w.dtype)))
    return _product((x, None), (w, None), ("none", "none"), split, out_dtype, "invariant_matmul")


def _product(x, w, scales, split, out_dtype, name):
    """Rows times the transpose of a weight: operands with their scales as `mainloop` reads them."""
    m, n = len(x[0]), len(w[0])
    x, w = ((pad(values, 8, block_of(values.dtype)), of) for values, of in (x, w))
    product = few_rows if m <= FEW_ROWS else many_rows
    return product(x, w, scales, split, out_dtype, name)[:m, :n]


def pad(x, rows, columns):
    """x with both sides a multiple of these: Mosaic's tiled copies want whole tiles, of 8 rows and
    a swizzle's columns."""
    extra = [(0, -side % to) for side, to in zip(x.shape, (rows, columns), strict=True)]
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def many_rows(x, w, scales, split, out_dtype, name):
    """Tiles of 128 x 128 of the result."""
    (m, k), n, dtype = x[0].shape, mosaic.whole_swizzles(len(w[0]), out_dtype), x[0].dtype
    left, right = Side(dtype, TILE_ROWS, scales[0]), Side(w[0].dtype, TILE_COLUMNS, scales[1])
    grid, steps = (-(-m // TILE_ROWS), -(-n // TILE_COLUMNS)), -(-k // block_of(dtype))
    tiles, tile, float32_out = (
        grid[0] * grid[1],
        (CONSUMERS, WGMMA_ROWS, TILE_COLUMNS),
        out_dtype == jnp.float32,
    )
    # as many slots as leave room for the result, and for the sums of a split contraction where the
    # result is narrower
    stages = 5 if split == 1 and not float32_out else 4

    def body(x, w, out, ring, staged, sums):
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

        run((left, *x), (right, *w), ring, tiles, stages, place, finish)

    scratch = {
        "ring": ring_scratch(left, right, stages),
        "staged": mosaic.tiled(tile, out_dtype),
        "sums": mosaic.tiled(tile, jnp.float32) if split > 1 and not float32_out else None,
    }
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    return mosaic.launch(body, out, scratch=scratch, threads=CONSUMERS + 1, tiles=tiles, name=name)(
        x, w
    )


def in_parts(sums, total, steps, split):
    """The sum over the parts, one after the other. Registers hold one part and one product; the sum
    waits in shared memory."""
    sums[...] = mosaic.layout_cast(jnp.zeros(sums.shape, jnp.float32), mosaic.Layout.WGMMA)

    def one(part, _):
        first = part_of(steps, split, part)
        sums[...] = sums[...] + total(first, part_of(steps, split, part + 1) - first)

    lax.fori_loop(0, split, one, None)
    return sums[...]


def few_rows(x, w, scales, split, out_dtype, name):
    """Tiles of 128 rows of the weight by all rows of x, a part of the contraction each; the parts
    are added afterwards."""
    (m, k), n, dtype = x[0].shape, len(w[0]), x[0].dtype
    columns = next(c for c in (8, 16, 32, 64, 128) if c >= m)
    left, right = Side(w[0].dtype, TILE_ROWS, scales[1]), Side(dtype, columns, scales[0])
    steps, stages = -(-k // block_of(dtype)), 4 if columns == 128 else 6
    tiles = -(-n // TILE_ROWS) * split

    def body(x, w, out, ring, staged):
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

        run((left, *w), (right, *x), ring, tiles, stages, place, finish)

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
        name=f"{name}_few_rows",
    )(x, w)
    value = jnp.zeros(parts.shape[1:], jnp.float32)
    for part in parts:
        value = value + part
    return rounded(value.T, out_dtype)
