"""Grouped product in plain XLA: ragged_dot of the dequantized operands.

Where XLA has no ragged product of its own (a CPU), it multiplies every row with every group's
weight and keeps one of them: right, and `groups` times the work.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import dequantize_blocks
from pallas_kernels.rounding import rounded

BY_ROW = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def matmul(x, x_scales, w, w_scales, group_sizes, w_block, out_dtype):
    x = dequantize_blocks(x, x_scales, (1, w_block[1]))
    return rounded(dot(x, dequantize_blocks(w, w_scales, w_block), group_sizes), out_dtype)


def dot(x, w, group_sizes):
    """Multiply x [m, k], sorted by group, with w [groups, n, k] transposed, accumulated in float32.

    Zero behind the last group.
    """
    out = lax.ragged_dot_general(x, w, group_sizes, BY_ROW, preferred_element_type=jnp.float32)
    # a backend need not write the rows behind the last group
    inside = jnp.arange(len(x)) < group_sizes.sum()
    return jnp.where(inside[:, None], out, 0.0)


def outer_products(dy, dy_scales, x, x_scales, group_sizes, block):
    return outer_product(
        dequantize_blocks(dy, dy_scales, (block, 1)),
        dequantize_blocks(x, x_scales, (block, 1)),
        group_sizes,
    )


def outer_product(dy, x, group_sizes):
    """Multiply dy [m, n] transposed with x [m, k] over each group's rows, [groups, n, k]."""
    inside = (jnp.arange(len(x)) < group_sizes.sum())[:, None]
    dy, x = jnp.where(inside, dy, 0.0), jnp.where(inside, x, 0.0)
    return lax.ragged_dot_general(
        dy, x, group_sizes, _OVER_ROWS, preferred_element_type=jnp.float32
    )


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


def aligned_rows(rows, groups, block):
    """Count the most rows that alignment can need."""
    return -(-rows // block) * block + groups * block
