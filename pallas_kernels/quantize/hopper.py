"""The quantizers on Hopper: one kernel, which reads what it quantizes one time and is bound by
those bytes.

Each warpgroup works alone, on tiles that TMA brings into a ring of its own. In registers a strip of
64 groups lies as wgmma's accumulators do, a group in four threads: 64 rows of 128 columns, or, read
through a transposed view of the same tile, 64 columns of 128 rows. Groups along tokens are
therefore written as the transposed matrix, contiguous along tokens: what FP8 wgmma wants of the
operands of a weight gradient. Scales of groups are written as [groups, rows], as the products load
them.

The quantizers on Hopper: what each one hands to the kernel, and the form in which the kernel's
results leave.

The kernel writes scales as [groups, rows] and groups along tokens as the transposed matrix, because
the products load them so. The functions here return transposed views; a product transposes again,
and under one jit XLA removes both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.quantize.reference import amax, magnitude_bits, reciprocal, scale_of

STRIP, GROUP = 64, 128
ROWS, TOKENS, SQUARE = "rows", "tokens", "square"
GROUPINGS = {(1, GROUP): ROWS, (GROUP, 1): TOKENS, (GROUP, GROUP): SQUARE}


@mosaic.outlined("block", "dtype", "rule")
def quantize_blocks(x, block, dtype, rule):
    (*batch, m, n), (rows, columns) = x.shape, block
    layers = (1, -1) if rows == 1 else (-1, m)
    ((values, scales),) = _groupings(x.reshape(*layers, n), (GROUPINGS[block],), dtype, rule)
    return values.reshape(x.shape), scales.reshape(*batch, -(-m // rows), -(-n // columns))


@mosaic.outlined("dtype", "rule")
def quantize_both(x, dtype, rule):
    results = _groupings(x.reshape(-1, *x.shape[-2:]), (ROWS, TOKENS), dtype, rule)
    return tuple(
        (values.reshape(x.shape), scales.reshape(*x.shape[:-2], *scales.shape[1:]))
        for values, scales in results
    )


@mosaic.outlined("dtype", "rule")
def regroup(values, scales, dtype, rule):
    """Groups along tokens of what is quantized in groups along rows."""
    x, rows = values.reshape(1, -1, values.shape[-1]), scales.reshape(1, -1, scales.shape[-1])
    source = Source(
        (_aligned(x, (TOKENS,)),), lambda x, rows, _: x * rows(), rows=_aligned_rows(rows)
    )
    ((values, scales),) = _run(source, (TOKENS,), dtype, rule, x.shape, "regroup")
    return values[0], scales[0]


@mosaic.outlined("dtype", "rule")
def quantize_swiglu(gate, up, dtype, rule):
    def make(gate, up, *_):
        rounded = partial(mosaic.rounded, dtype=kind)
        return rounded(rounded(gate * (1.0 / (1.0 + jnp.exp(-gate)))) * up)

    kind, rows = gate.dtype, (1, -1, gate.shape[-1])
    source = Source(tuple(_aligned(x.reshape(rows), (ROWS,)) for x in (gate, up)), make)
    return _rows(source, dtype, rule, gate.shape, "quantize_swiglu")


@mosaic.outlined("dtype", "rule")
def quantize_rms_norm(x, inverse, gain, dtype, rule):
    def make(x, rows, columns):
        return mosaic.rounded(x * rows() * columns(), kind)

    kind, n = x.dtype, x.shape[-1]
    rows = _pad(inverse.reshape(1, -1, 1), (8, 1)).swapaxes(1, 2)
    source = Source(
        (_aligned(x.reshape(1, -1, n), (ROWS,)),), make, rows, jnp.pad(gain, (0, -n % 128))
    )
    return _rows(source, dtype, rule, x.shape, "quantize_rms_norm")


def _rows(source, dtype, rule, shape, name):
    (*batch, n), m = shape, math.prod(shape[:-1])
    ((values, scales),) = _run(source, (ROWS,), dtype, rule, (1, m, n), name)
    return values.reshape(shape), scales.reshape(*batch, -1)


def _groupings(x, groupings, dtype, rule):
    """(values, scales) of each grouping of x [layers, m, n]."""
    source = Source((_aligned(x, groupings),), lambda x, *_: x)
    return _run(source, groupings, dtype, rule, x.shape, "quantize_" + "_".join(groupings))


def _run(source, groupings, dtype, rule, shape, name):
    (_, m, n), written = (
        shape,
        iter(quantize(source, plan_of(groupings, dtype, rule, source), name)),
    )
    results = []
    for grouping, values, scales in zip(groupings, written, written, strict=True):
        if grouping == ROWS:
            results.append((values[:, :m, :n], scales[:, :, :m].swapaxes(1, 2)))
        elif grouping == TOKENS:
            results.append((values[:, :n, :m].swapaxes(1, 2), scales[:, :, :n]))
        else:
            results.append((values[:, :m, :n], scales))
    return results


def _aligned(x, groupings):
    """x [layers, m, n] with its columns in 128s, and its rows where they become columns: TMA wants
    whole swizzled rows, and eight of them."""
    return _pad(x, (128 if TOKENS in groupings else 8, 128))


def _aligned_rows(scales):
    """Scales [layers, m, groups] as the kernel reads them."""
    return _pad(scales, (128, 1)).swapaxes(1, 2)


def _pad(x, sides):
    extra = [(0, -side % of) for side, of in zip(x.shape[1:], sides, strict=True)]
    return jnp.pad(x, [(0, 0), *extra]) if any(after for _, after in extra) else x


class Source(NamedTuple):
    """What is quantized: a function of tiles of one or two matrices, element by element.

    Attributes:
        matrices: [layers, m, n], both sides multiples of `alignment`.
        make: (float32 strips of the matrices, read_rows, read_columns) -> float32 strip; the
            readers return a strip's numbers of `rows` and `columns`, broadcast to it.
        rows: float32 [layers, groups, m], one number for each 128-group of a row, or None.
        columns: float32 [n], or None.
    """

    matrices: tuple[jax.Array, ...]
    make: Callable
    rows: jax.Array | None = None
    columns: jax.Array | None = None


class Plan(NamedTuple):
    """What a kernel writes, and in which tiles.

    Attributes:
        groupings: of ROWS, TOKENS and SQUARE, in the order of the results.
        dtype, rule: of the values and of their scales.
        tile: rows and columns that a warpgroup reads at a time.
        warpgroups, stages: of a block, and slots of each one's ring.
    """

    groupings: tuple[str, ...]
    dtype: jnp.dtype
    rule: str
    tile: tuple[int, int]
    warpgroups: int
    stages: int


def plan_of(groupings: tuple[str, ...], dtype: jnp.dtype, rule: str, source: Source) -> Plan:
    """Choose the tiles, and as many warpgroups as shared memory and the work have use for."""
    tile = {(ROWS,): (STRIP, GROUP), (TOKENS,): (GROUP, STRIP)}.get(groupings, (GROUP, GROUP))
    layers, m, n = source.matrices[0].shape
    tiles = layers * -(-m // tile[0]) * -(-n // tile[1])
    loaded = tile[0] * tile[1] * sum(x.dtype.itemsize for x in source.matrices) + 4 * sum(tile)
    written = (tile[0] * tile[1] + 4 * GROUP) * len(groupings)
    fits = (
        (w, s)
        for s in (2, 1)
        for w in (4, 3, 2, 1)
        if w * (s * loaded + written) < mosaic.SMEM_BYTES - 2048 and w * s > 1
    )
    warpgroups, stages = next(fits)
    return Plan(
        groupings, dtype, rule, tile, min(warpgroups, -(-tiles // mosaic.multiprocessors())), stages
    )


def quantize(source: Source, plan: Plan, name: str) -> list[jax.Array]:
    """Run the kernel.

    Returns:
        Values and scales of each grouping: [layers, m, n] and [layers, groups, m in whole tiles] of
        ROWS, [layers, n, m] and [layers, groups, n] of TOKENS, [layers, m, n] and [layers, row
        blocks, column blocks] of SQUARE.
    """
    layers, m, n = source.matrices[0].shape
    (r, c), warpgroups, stages = plan.tile, plan.warpgroups, plan.stages
    grid = (layers, -(-m // r), -(-n // c))
    tiles = grid[0] * grid[1] * grid[2]
    arrays = [x for x in (*source.matrices, source.rows, source.columns) if x is not None]
    out = [
        array for grouping in plan.groupings for array in _results(grouping, plan, (layers, m, n))
    ]

    def body(*refs):
        given, results, scratch = refs[: len(arrays)], refs[len(arrays) : -4], refs[-4:]
        slots, full, values, scales = scratch
        wg, first, step = (
            lax.axis_index("wg"),
            lax.axis_index(("block", "wg")),
            lax.axis_size(("block", "wg")),
        )
        count = lax.div(tiles - first + step - 1, step)

        def place(i):
            row, column = lax.div(first + i * step, grid[2]), lax.rem(first + i * step, grid[2])
            return lax.div(row, grid[1]), lax.rem(row, grid[1]), column

        def load(i):
            slot = lax.rem(i, stages)
            for ref, to in zip(_tiles(given, source, plan, place(i)), slots, strict=True):
                mosaic.copy_gmem_to_smem(ref, to.at[wg, slot], full.at[wg * stages + slot])

        for slot in range(stages):
            mosaic.when(slot < count)(lambda slot=slot: load(jnp.int32(slot)))

        def one(i, _):
            slot = lax.rem(i, stages)
            mosaic.barrier_wait(full.at[wg * stages + slot])
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            loaded = [ref.at[wg, slot] for ref in slots]
            for k, grouping in enumerate(plan.groupings):
                _quantize_tile(grouping, source, loaded, values[k].at[wg], scales[k].at[wg], plan)
            mosaic.commit_smem()
            for k, grouping in enumerate(plan.groupings):
                _store(
                    grouping,
                    place(i),
                    (values[k].at[wg], scales[k].at[wg]),
                    results[2 * k : 2 * k + 2],
                    plan.tile,
                )
            mosaic.when(i + stages < count)(lambda: load(i + stages))

        lax.fori_loop(0, count, one, None)
        mosaic.wait_smem_to_gmem(0)

    slots = [mosaic.tiled((warpgroups, stages, r, c), x.dtype) for x in source.matrices]
    slots += [mosaic.SMEM((warpgroups, stages, r), jnp.float32)] if source.rows is not None else []
    slots += (
        [mosaic.SMEM((warpgroups, stages, c), jnp.float32)] if source.columns is not None else []
    )
    sides = [plan.tile[::-1] if grouping == TOKENS else plan.tile for grouping in plan.groupings]
    scratch = [
        slots,
        mosaic.Barrier(num_arrivals=len(arrays), num_barriers=warpgroups * stages),
        [mosaic.tiled((warpgroups, *side), plan.dtype) for side in sides],
        [mosaic.SMEM((warpgroups, side[0]), jnp.float32) for side in sides],
    ]
    blocks = -(-tiles // warpgroups)
    return mosaic.launch(body, out, scratch=scratch, threads=warpgroups, tiles=blocks, name=name)(
        *arrays
    )


def _results(grouping, plan, shape):
    layers, m, n = shape
    blocks = (-(-m // GROUP), -(-n // GROUP))
    values, scales = {
        ROWS: ((layers, m, n), (layers, blocks[1], m + -m % plan.tile[0])),
        TOKENS: ((layers, n, m), (layers, blocks[0], n)),
        SQUARE: ((layers, m, n), (layers, *blocks)),
    }[grouping]
    return jax.ShapeDtypeStruct(values, plan.dtype), jax.ShapeDtypeStruct(scales, jnp.float32)


def _tiles(given, source, plan, place):
    """What a tile is made from, in global memory."""
    (layer, row, column), (r, c), count = place, plan.tile, len(source.matrices)
    rows, columns = mosaic.ds(row * r, r), mosaic.ds(column * c, c)
    refs = [ref.at[layer, rows, columns] for ref in given[:count]]
    if source.rows is not None:
        group = lax.div(column * c, GROUP) if source.rows.shape[1] > 1 else 0
        refs.append(given[count].at[layer, group, rows])
    if source.columns is not None:
        refs.append(given[-1].at[columns])
    return refs


def _quantize_tile(grouping, source, loaded, values, scales, plan):
    """From a slot of the ring into what is staged for one grouping."""
    transposed = grouping == TOKENS
    parts = [
        mosaic.ds(start, STRIP) for start in range(0, plan.tile[1 if transposed else 0], STRIP)
    ]

    def write(part, x, scale):
        # at most a rounding above the largest value, which the cast rounds to: nothing is left to
        # clamp
        values[part] = (x * lax.broadcast_in_dim(reciprocal(scale), x.shape, [0])).astype(
            plan.dtype
        )
        scales[part] = scale

    if grouping == SQUARE:
        # through shared memory of its own: Mosaic's reduction across warps has one scratch for all
        # warpgroups
        tops = [amax(_strip(source, loaded, part, False), axis=1) for part in parts]
        scales[mosaic.ds(0, STRIP)] = reduce(jnp.maximum, tops)
        top = mosaic.load(
            scales.at[mosaic.ds(0, STRIP)], layout=mosaic.Layout.WGMMA.reduce(0), optimized=False
        )
        top = lax.broadcast(magnitude_bits(top).max(), (STRIP,))
        top = mosaic.layout_cast(top, mosaic.Layout.WGMMA.reduce(1))
        scale = scale_of(lax.bitcast_convert_type(top, jnp.float32), plan.dtype, plan.rule)
        for part in parts:
            write(part, _strip(source, loaded, part, False), scale)
    else:
        for part in parts:
            x = _strip(source, loaded, part, transposed)
            write(part, x, scale_of(amax(x, axis=1), plan.dtype, plan.rule))


def _strip(source, loaded, part, transposed):
    """64 groups, float32 [64, 128]."""
    matrices = loaded[: len(source.matrices)]
    # no layout of 8-bit numbers can be turned into wgmma's: they become float32 first
    eight_bits = transposed and any(x.dtype.itemsize == 1 for x in source.matrices)
    layout = mosaic.Layout.WGMMA_TRANSPOSED if eight_bits else mosaic.Layout.WGMMA

    def vector(ref, along_groups):
        ref = ref.at[part] if not along_groups else ref
        line = mosaic.load(ref, layout=layout.reduce(0 if along_groups else 1), optimized=False)
        return lax.broadcast_in_dim(line, (STRIP, GROUP), [1 if along_groups else 0])

    refs = [ref.at[:, part].transpose((1, 0)) if transposed else ref.at[part] for ref in matrices]
    strips = [
        mosaic.load(ref, layout=layout, optimized=not eight_bits).astype(jnp.float32)
        for ref in refs
    ]
    x = source.make(
        *strips,
        lambda: vector(loaded[len(matrices)], transposed),
        lambda: vector(loaded[-1], not transposed),
    )
    return mosaic.layout_cast(x, mosaic.Layout.WGMMA)


def _store(grouping, place, staged, results, tile):
    (values, scales), (out, out_scales), (layer, row, column), (r, c) = staged, results, place, tile
    if grouping == TOKENS:
        row, column, r, c = column, row, c, r
    mosaic.copy_smem_to_gmem(values, out.at[layer, mosaic.ds(row * r, r), mosaic.ds(column * c, c)])
    if grouping == SQUARE:
        out_scales[layer, row, column] = scales[0]
    else:
        mosaic.copy_smem_to_gmem(scales, out_scales.at[layer, column, mosaic.ds(row * r, r)])
