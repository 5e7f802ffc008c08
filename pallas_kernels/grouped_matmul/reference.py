"""Grouped product in plain XLA: ragged_dot of the dequantized operands.

Where XLA has no ragged product of its own (a CPU), it multiplies every row with every group's weight and keeps one of them:
right, and `groups` times the work.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import dequantize_blocks

_DIMENSIONS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def matmul(x, x_scales, w, w_scales, group_sizes, w_block, out_dtype):
    x = dequantize_blocks(x, x_scales, (1, w_block[1]))
    return dot(x, dequantize_blocks(w, w_scales, w_block), group_sizes).astype(out_dtype)


def dot(x, w, group_sizes):
    """x [m, k], sorted by group, times w [groups, n, k] transposed, accumulated in float32; zero behind the last group."""
    out = lax.ragged_dot_general(x, w, group_sizes, _DIMENSIONS, preferred_element_type=jnp.float32)
    # a backend need not write the rows behind the last group
    inside = jnp.arange(len(x)) < group_sizes.sum()
    return jnp.where(inside[:, None], out, 0.0)
