"""Products on Hopper: many rows with x on the left of wgmma, few with the weight there.

wgmma multiplies 64 rows of its left operand at least, and 8 of its right one. A decode step has
fewer than 64 rows, so there the weight goes left, and where it has few tiles its contraction is
split, so that all multiprocessors load. The split is a function of the weight's shape alone. Many
rows need none; where a row is to have the same sum whatever m is (`batch_invariant`), they add the
same parts in the same order.

Blocks in pairs load what they share together: many rows the weight's tile, 65 to 128 rows x's.
"""

from __future__ import annotations

import math
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
# multiprocessors of an H200, and tiles enough to load about as fast as its memory gives; constants,
# so that the order of a sum does not depend on the card
_WAVE, _ENOUGH = 132, 90


def split_of(n: int, steps: int) -> int:
    """Choose how many parts few rows split a contraction of so many blocks into.

    None where the weight's tiles are enough. Else of 1 to 4, the first that leaves the fewest
    multiprocessors idle at the end.
    """
    tiles = -(-n // TILE_ROWS)

    def busy(parts):
        return tiles * parts / (-(-tiles * parts // _WAVE) * _WAVE)

    most = 1 if tiles >= _ENOUGH else 4
    return max((p for p in range(1, most + 1) if p == 1 or steps >= 4 * p), key=busy)


def part_of(steps: int, split: int, part):
    """First 128-block of a part of the contraction."""
    return steps * part // split if isinstance(part, int) else lax.div(steps * part, split)


@mosaic.outlined("w_block", "out_dtype", "batch_invariant")
def matmul(x, x_scales, w, w_scales, w_block, out_dtype, batch_invariant):
    by_row = w_block[0] == 1
    rows, of_rows = _rows(x, x_scales)
    of_weight = pad(w_scales, 8, 1).T if by_row else w_scales
    # many rows lose a fifth of their speed to the parts of few rows. A weight with a scale a row is
    # the other half of a weight gradient: nothing to keep equal to
    split = _split(w) if not by_row and (batch_invariant or len(rows) <= FEW_ROWS) else 1
    scales, name = ("row", "row" if by_row else "block"), "blockwise_matmul"
    out = _product((rows, of_rows), (w, of_weight), scales, split, out_dtype, name)
    return out.reshape(*x.shape[:-1], -1)


@mosaic.outlined("out_dtype")
def matmuls(x, x_scales, *weights, out_dtype):
    """Few rows times the transpose of each of several weights, given as values and scales in turn,
    in blocks of (128, 128)."""
    values, w_scales = weights[::2], weights[1::2]
    rows, of_rows = _rows(x, x_scales)
    splits, scales = [_split(w) for w in values], ("row", "block")
    whole = [pad(side, 8, BLOCK_K) for side in (rows, *values)]
    given = tuple(whole[1:]), tuple(w_scales)
    out = few_rows((whole[0], of_rows), given, scales, splits, out_dtype, "blockwise_matmul")
    return [
        y[: len(rows), : len(w)].reshape(*x.shape[:-1], -1)
        for y, w in zip(out, values, strict=True)
    ]


@mosaic.outlined("out_dtype")
def dot(x, w, out_dtype):
    """x [m, k] times the transpose of w [n, k], of one 16-bit dtype."""
    return _product(
        (x, None), (w, None), ("none", "none"), _split(w), out_dtype, "invariant_matmul"
    )


def _rows(x, x_scales):
    """The rows of x as one matrix, and their scales as `mainloop` reads them."""
    rows = x.reshape(-1, x.shape[-1])
    return rows, pad(x_scales.reshape(len(rows), -1), 8, 1).T


def _split(w):
    return split_of(len(w), -(-w.shape[1] // block_of(w.dtype)))


def _product(x, w, scales, split, out_dtype, name):
    """Rows times the transpose of a weight: operands with their scales as `mainloop` reads them."""
    m, n = len(x[0]), len(w[0])
    x, w = ((pad(values, 8, block_of(values.dtype)), of) for values, of in (x, w))
    if m <= FEW_ROWS:
        (out,) = few_rows(x, ((w[0],), w[1]), scales, [split], out_dtype, name)
    else:
        out = many_rows(x, w, scales, split, out_dtype, name)
    return out[:m, :n]


def pad(x, rows, columns):
    """x with both sides a multiple of these: Mosaic's tiled copies want whole tiles, of 8 rows and
    a swizzle's columns."""
    extra = [(0, -side % to) for side, to in zip(x.shape, (rows, columns), strict=True)]
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def many_rows(x, w, scales, split, out_dtype, name):
    """Tiles of 128 x 128 of the result, by pairs of blocks that load the weight's tile together."""
    (m, k), n, dtype = x[0].shape, mosaic.whole_swizzles(len(w[0]), out_dtype), x[0].dtype
    row_tiles, steps = -(-m // TILE_ROWS), -(-k // block_of(dtype))
    cluster = 1 if row_tiles % 2 else 2  # blocks with tiles below each other, so of one weight tile
    left = Side(dtype, TILE_ROWS, scales[0])
    right = Side(w[0].dtype, TILE_COLUMNS, scales[1], shared=cluster > 1)
    grid = (row_tiles // cluster, -(-n // TILE_COLUMNS))
    tiles, tile, float32_out = (
        grid[0] * grid[1],
        (CONSUMERS, WGMMA_ROWS, TILE_COLUMNS),
        out_dtype == jnp.float32,
    )
    # as many slots as leave room for the result, and for the sums of a split contraction where the
    # result is narrower
    stages = 5 if split == 1 and not float32_out else 4

    def body(x, w, out, ring, staged, sums):
        def at(tile):
            i, j = mosaic.planar_snake(tile, grid, 1, 8)
            return i * cluster + lax.axis_index("cluster"), j

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
    return mosaic.launch(
        body,
        out,
        scratch=scratch,
        threads=CONSUMERS + 1,
        tiles=tiles,
        name=name,
        cluster=cluster,
    )(x, w)


def in_parts(sums, total, steps, split):
    """The sum over at least two parts, one after the other. Registers hold one part and its
    products; the sum waits in shared memory."""

    def part(number):
        first = part_of(steps, split, number)
        return total(first, part_of(steps, split, number + 1) - first)

    def add(number, _):
        value = part(number)  # before the sum is read, which registers cannot hold meanwhile
        sums[...] = sums[...] + value

    sums[...] = part(0)
    lax.fori_loop(1, split - 1, add, None)
    last = part(split - 1)
    return sums[...] + last


def few_rows(x, weights, scales, splits, out_dtype, name):
    """Tiles of 128 rows of a weight by all rows of x, a part of the contraction each; where it is
    split, the parts are added afterwards.

    Args:
        x: values [m, k] and scales.
        weights: values [n, k] of each, whose tiles follow each other, and their scales; of a single
            weight these need not be a tuple.
        scales: kinds of x's and the weights' scales.
        splits: parts of each weight's contraction.

    Returns:
        The product with each, [m, n and what fills its last 128 bytes].
    """
    (m, k), dtype, values = x[0].shape, x[0].dtype, weights[0]
    columns = next(c for c in (8, 16, 32, 64, 128) if c >= m)
    steps, blocks = -(-k // block_of(dtype)), [-(-len(w) // TILE_ROWS) for w in values]
    # where x's tile is as large as a weight's, two blocks load it together
    cluster = 2 if columns == 128 and not any(count % 2 for count in blocks) else 1
    left = Side(values[0].dtype, TILE_ROWS, scales[1])
    right = Side(dtype, columns, scales[0], shared=cluster > 1)
    tiles = [count // cluster * split for count, split in zip(blocks, splits, strict=True)]
    part_dtypes = [jnp.dtype(out_dtype if split == 1 else jnp.float32) for split in splits]
    staged = {dtype: (CONSUMERS, columns, WGMMA_ROWS) for dtype in dict.fromkeys(part_dtypes)}
    held = sum(math.prod(shape) * dtype.itemsize for dtype, shape in staged.items())
    slot = (TILE_ROWS + columns) * BLOCK_K + 4 * max(columns, 32)
    stages = min(8, (mosaic.SMEM_BYTES - 6144 - held) // slot)

    def place_in(number, tile):
        """A weight's rows and part of the contraction that a tile, one of its own, takes."""
        own, split = tile - sum(tiles[:number]), splits[number]
        return lax.div(own, split) * cluster + lax.axis_index("cluster"), lax.rem(own, split)

    def body(x, weights, *out, ring, staged):
        def place(tile):
            places = []
            for number, split in enumerate(splits):
                i, part = place_in(number, tile)
                first = part_of(steps, split, part)
                count = part_of(steps, split, part + 1) - first
                places.append(Place(i * TILE_ROWS, 0, i, 0, first, count, number))
            found = places[0]
            for number, other in enumerate(places[1:], 1):
                later = tile >= sum(tiles[:number])
                found = Place(*(jnp.where(later, *pair) for pair in zip(other, found, strict=True)))
            return found

        def finish(tile, wg, total):
            at = place(tile)
            value = total(0, at.steps)
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            mosaic.choose(at.array, [partial(write, i, tile, wg, value) for i in range(len(out))])

        def write(number, tile, wg, value):
            i, part = place_in(number, tile)
            to, value = staged[part_dtypes[number].name], value.astype(part_dtypes[number])
            if value.dtype == jnp.float32:  # whose transposed stores have a layout of their own
                value = mosaic.layout_cast(value, mosaic.Layout.WGMMA_TRANSPOSED)
            to.at[wg].transpose((1, 0))[...] = value
            mosaic.commit_smem()
            of_weight = mosaic.ds(i * TILE_ROWS + wg * WGMMA_ROWS, WGMMA_ROWS)
            mosaic.copy_smem_to_gmem(
                to.at[wg], out[number].at[part, mosaic.ds(0, columns), of_weight]
            )

        run((left, *weights), (right, *x), ring, sum(tiles), stages, place, finish)

    widths = [
        mosaic.whole_swizzles(len(w), kind) for w, kind in zip(values, part_dtypes, strict=True)
    ]
    products = mosaic.launch(
        body,
        tuple(
            jax.ShapeDtypeStruct((split, m, n), kind)
            for split, n, kind in zip(splits, widths, part_dtypes, strict=True)
        ),
        scratch={
            "ring": ring_scratch(left, right, stages),
            "staged": {dtype.name: mosaic.tiled(shape, dtype) for dtype, shape in staged.items()},
        },
        threads=CONSUMERS + 1,
        tiles=sum(tiles),
        name=f"{name}_few_rows",
        cluster=cluster,
    )(x, weights)
    return [rounded(_added(parts), out_dtype) for parts in products]


def _added(parts):
    value = parts[0]
    for part in parts[1:]:
        value = value + part
    return value
