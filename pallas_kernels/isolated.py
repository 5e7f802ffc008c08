"""Operations that XLA compiles by themselves, so that a row has the same bits in every batch.

What a program does around a float32 operation changes its last bits: a product that feeds a sum
becomes one instruction with one rounding, a transposed operand is multiplied by another plan, a sum
is split. Here an operation stands between two barriers, which XLA moves nothing across. What is
left of a row's company is the number of rows, and of that these operations are independent:

    by elements     each element has the same instructions, in a vector or left over behind one
    products        the rows are the left operand, and both operands have their terms last: the plan
                    depends on the other operand's shape, and rows are only its outermost loop. A
                    single row has a plan of its own and is padded, so that there is no single row.
    sums            a product with ones. XLA's own sums depend on the number of rows.

That is right by test (tests/kernels/test_isolated.py, experiments.isolated), and not by argument as
`pallas_kernels.exact` is: for one CPU device, which is what it was tested on (`is_available`). It
costs time in products of few rows alone (docs/results.md). The batch-invariant kernels of Thinking
Machines ("Defeating nondeterminism in LLM inference", 2025) rest on the same observation for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.exact import materialize, with_gradient_of
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.matmul import reference
from pallas_kernels.rounding import rounded

__all__ = ["dot", "grouped_dot", "is_available", "isolated", "row_sum"]

FEWEST_ROWS = 8
"""Rows of a product at least, and columns of ones in a sum."""
_BLOCK = 128  # terms of a sum that are added first, where there are many of them
_MANY = 1024


def is_available() -> bool:
    """Whether a row's bits are promised: on one CPU device."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def isolated(function: Callable) -> Callable:
    """Compute a function of arrays alone by itself, with its own derivatives."""
    return with_gradient_of(function, lambda *arrays: materialize(function(*materialize(arrays))))


def dot(
    x: Float[Array, "*batch k"], w: Float[Array, "n k"], out_dtype: jnp.dtype = jnp.float32
) -> Float[Array, "*batch n"]:
    """Multiply x @ w.T in float32, each row of it a function of that row of x and of w alone.

    Args:
        x, w: any float dtype up to float32.
        out_dtype: of the result.
    """

    def plain(x, w):
        return reference.dot(x.astype(w.dtype), w).astype(out_dtype)

    def exactly(x, w):
        rows = x.reshape(-1, x.shape[-1])
        out = rounded(_product(rows, w)[: len(rows)], out_dtype)
        return out.reshape(*x.shape[:-1], len(w))

    return with_gradient_of(plain, exactly)(x, w)


def grouped_dot(
    x: Float[Array, "m k"],
    w: Float[Array, "groups n k"],
    group_sizes: Int[Array, " groups"],
    out_dtype: jnp.dtype = jnp.float32,
) -> Float[Array, "m n"]:
    """Multiply each row of x, sorted by group, with its group's part of w transposed.

    A row has the bits that `dot` gives it.

    Returns:
        [m, n] in `out_dtype`; zero behind the last group.
    """

    def plain(x, w, sizes):
        return grouped_reference.dot(x.astype(w.dtype), w, sizes).astype(out_dtype)

    def exactly(x, w, sizes):
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

    return with_gradient_of(plain, exactly)(x, w, group_sizes)


def row_sum(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """Add float32 terms over the last axis."""

    def exactly(x):
        rows, n = x.reshape(-1, x.shape[-1]), x.shape[-1]
        if n > _MANY:
            rows = jnp.pad(rows, ((0, 0), (0, -n % _BLOCK)))
            rows = _sums(rows.reshape(-1, _BLOCK)).reshape(len(rows), -1)
        return _sums(rows).reshape(*x.shape[:-1], 1)

    return with_gradient_of(lambda x: x.sum(-1, keepdims=True), exactly)(x)


def _sums(rows: Array) -> Array:
    return _product(rows, jnp.ones((FEWEST_ROWS, rows.shape[-1])))[: len(rows), 0]


def _product(x: Array, w: Array) -> Array:
    """x @ w.T in float32 by itself; at least `FEWEST_ROWS` rows."""
    x = jnp.pad(x.astype(jnp.float32), ((0, max(0, FEWEST_ROWS - len(x))), (0, 0)))
    contract = (((1,), (1,)), ((), ()))
    return materialize(
        lax.dot_general(*materialize((x, w.astype(jnp.float32))), contract, "highest")
    )
