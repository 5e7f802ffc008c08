"""Batch-invariant products and sums on a CPU: XLA's own, in the forms that do not depend on the
number of rows.

    products    The rows are the left operand, and both operands have their terms last: the plan
                depends on the other operand's shape, and rows are only its outermost loop. A
                single row has a plan of its own and is padded, so that there is no single row.
    sums        A product with ones, in `FEWEST_ROWS` columns. XLA's own sums depend on the
                number of rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.exact import materialize
from pallas_kernels.grouped_matmul.reference import FEWEST_ROWS, dot_by_tiles
from pallas_kernels.rounding import rounded

_BLOCK = 128  # terms of a sum that are added first, where there are many of them
_MANY = 1024


def dot(x, w, out_dtype):
    rows = x.reshape(-1, x.shape[-1])
    out = rounded(_product(rows, w)[: len(rows)], out_dtype)
    return out.reshape(*x.shape[:-1], len(w))


def grouped_dot(x, w, sizes, out_dtype):
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    return rounded(dot_by_tiles(x, w, sizes, _product), out_dtype)


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
