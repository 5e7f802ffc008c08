"""Blockwise-scaled product in plain XLA: one float32 product of the dequantized operands.

An e4m3 value times its float32 scale is rounded once (relative error 2^-24), so this equals the
block-by-block sum up to float32 rounding, and a decode loop can keep the dequantized weight instead
of unpacking it at every token.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.rounding import rounded


def matmul(x, w, out_dtype):
    wide = x.rows().dequantize().reshape(*x.shape[:-1], -1)
    return rounded(dot(wide, w.dequantize()), out_dtype)


# on a CPU
FEW_ROWS = 256


def flatten_many_rows(x):
    """Reshape x as `dot` multiplies it: many rows as a matrix, few with the axes that they have."""
    return x if x.size // x.shape[-1] <= FEW_ROWS else x.reshape(-1, x.shape[-1])


def dot(x, w):
    """Multiply x [..., k] with w [n, k] transposed, accumulated in float32.

    The weight is the left operand: faster on a CPU, for few rows (decode) if they keep their axes,
    and for the gradients of many rows if they are flattened.
    """
    rows = flatten_many_rows(x)
    out = lax.dot_general(
        w, rows, (((1,), (rows.ndim - 1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.moveaxis(out, 0, -1).reshape(*x.shape[:-1], w.shape[0])
