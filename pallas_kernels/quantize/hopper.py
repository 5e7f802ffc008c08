"""The quantizers on Hopper: what each one hands to the kernel, and the form in which the kernel's
results leave.

The kernel writes scales as [groups, rows] and groups along tokens as the transposed matrix, because
the products load them so. The functions here return transposed views; a product transposes again,
and under one jit XLA removes both.
"""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.quantize.tiles import GROUP, ROWS, SQUARE, TOKENS, Source, plan_of, quantize

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
        sigmoid = rounded(1.0 / rounded(1.0 + rounded(jnp.exp(-gate))))
        return rounded(rounded(gate * sigmoid) * up)

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
