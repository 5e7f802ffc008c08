"""Batch-invariant products and sums on a CPU: XLA's own, in the forms that do not depend on the
number of rows.

    products    The rows are the left operand, and both operands have their terms last: the plan
                depends on the other operand's shape, and rows are only its outermost loop. A
                single row has a plan of its own and is padded, so that there is no single row.
    sums        A product with ones. XLA's own sums depend on the number of rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.exact import materialize
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.rounding import rounded

FEWEST_ROWS = 8
"""Rows of a product at least, and columns of ones in a sum."""
_BLOCK = 128  # terms of a sum that are added first, where there are many of them
_MANY = 1024


def dot(x, w, out_dtype):
    rows = x.reshape(-1, x.shape[-1])
    out = rounded(_product(rows, w)[: len(rows)], out_dtype)
    return out.reshape(*x.shape[:-1], len(w))


def grouped_dot(x, w, sizes, out_dtype):
    groups = len(w)
    # tiles of rows, and each group begins one: about as many rows as a group has
    size = min(128, max(FEWEST_ROWS, 1 << (len(x) // groups).bit_length() >> 1))
    place, aligned = grouped_reference.align(len(x), sizes, size)
    count = grouped_reference.aligned_rows(len(x), groups, size) // size
    spread = jnp.zeros((count * size, x.shape[-1]), jnp.float32)
    spread = spread.at[place].set(x.astype(jnp.float32), mode="drop")
    ends = jnp.cumsum(aligned) // size
    of_tile = jnp.searchsorted(ends, jnp.arange(count), side="right")
    # what is behind the last group is not read: any weight will do
    of_tile, weights = jnp.minimum(of_tile, groups - 1), w.astype(jnp.float32)

    def product(tile_and_group):
        tile, group = tile_and_group
        return _product(tile, lax.dynamic_index_in_dim(weights, group, keepdims=False))

    out = lax.map(product, (spread.reshape(count, size, -1), of_tile))
    out = jnp.take(out.reshape(count * size, -1), place, axis=0, mode="fill", fill_value=0)
    return rounded(out, out_dtype)


def row_sum(x):
    rows, n = x.reshape(-1, x.shape[-1]), x.shape[-1]
    if n > _MANY:
        rows = jnp.pad(rows, ((0, 0), (0, -n % _BLOCK)))
        rows = _sums(rows.reshape(-1, _BLOCK)).reshape(len(rows), -1)
    return _sums(rows).reshape(*x.shape[:-1], 1)


def _sums(rows: Array) -> Array:
    return _product(rows, jnp.ones((FEWEST_ROWS, rows.shape[-1])))[: len(rows), 0]


def _product(x: Array, w: Array) -> Array:
    """x @ w.T in float32 by itself; at least `FEWEST_ROWS` rows."""
    x = jnp.pad(x.astype(jnp.float32), ((0, max(0, FEWEST_ROWS - len(x))), (0, 0)))
    contract = (((1,), (1,)), ((), ()))
    return materialize(
        lax.dot_general(*materialize((x, w.astype(jnp.float32))), contract, "highest")
    )
